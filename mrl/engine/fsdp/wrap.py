"""Wrappers of a block's forward: compilation, recomputation in the backward pass, activations on the host.

    what                       keeps on the device, of each block      costs
    (nothing)                  all that its backward pass needs        nothing
    recompute full             its inputs                              another forward
    offload activations        nothing                                 a copy to the host and back of what it would keep
    both                       nothing                                 another forward, and copies of its inputs

FSDP gathers a block's weights before its forward and before its backward pass; the wrapped forward runs inside of that.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch.utils.checkpoint import checkpoint

from mrl.config.schema import EngineConfig
from mrl.engine.activations import ActivationOffload
from mrl.engine.fsdp.blocks import block_lists
from mrl.errors import ConfigError


def wrap_blocks(hf: nn.Module, engine: EngineConfig) -> ActivationOffload | None:
    """Wraps each block's forward as the config says. Returns the holder of activations if they are offloaded."""
    lists = block_lists(hf)
    if engine.fsdp.compile:
        _check_compiler()
        # Blocks of one class share their code. Of each there may be several versions: for windows of attention, passes
        # without gradients, and until tokens, documents and their longest length each are symbols.
        limit = 8 * sum(map(len, lists))
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, limit)
    offload = ActivationOffload() if "activations" in engine.offload else None
    for blocks in lists:
        for number, block in enumerate(blocks):
            if engine.fsdp.compile:
                # the forward and not the module: FSDP's hooks, which gather and free weights, stay outside
                block.forward = torch.compile(block.forward)
            if engine.recompute == "full" and number % engine.recompute_every == 0:
                block.forward = functools.partial(_recomputed, block.forward)
            if offload is not None:
                offload.wrap(block)
    return offload


def _recomputed(forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # use_reentrant=True takes no keyword arguments (torch 2.13, utils/checkpoint.py), and blocks are called with them
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _check_compiler() -> None:
    """Raises ConfigError without a C++ compiler: torch.compile makes C++ for a CPU, and a GPU's launchers."""
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise ConfigError(
            "engine.fsdp.compile",
            True,
            "needs a C++ compiler, and there is none",
            "install g++ or clang++ (or name one in CXX), or set it to false",
        ) from None
