"""The blocks of a model, found from the model itself. FSDP gathers one at a time, and recomputes one at a time.

A block is a member of a list of modules (`nn.ModuleList`). It is in no other block, it has modules of its own, and its
class repeats in the list. So the layers of a decoder are blocks, and those of a vision tower. Experts are lists inside
of blocks. No names of classes are needed; `_no_split_modules` of transformers decides for a list of one layer.

A block's forward may be wrapped: compilation, recomputation in the backward pass, activations on the host.

    what                       keeps on the device, of each block      costs
    (nothing)                  all that its backward pass needs        nothing
    recompute full             its inputs                              another forward
    offload activations        nothing                                 a copy to the host and back of what it would keep
    both                       nothing                                 another forward, and copies of its inputs

FSDP gathers a block's weights before its forward and before its backward pass; the wrapped forward runs inside of that.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mrl.config.schema import EngineConfig
from mrl.engine.offload import ActivationOffload
from mrl.errors import ConfigError


def block_lists(hf: nn.Module) -> list[list[nn.Module]]:
    """Returns the blocks of each list of `hf`, in the order of the model."""
    named = frozenset(hf._no_split_modules or ())
    return [blocks for blocks in (_blocks_of(found, named) for found in _outermost(hf)) if blocks]


def blocks_of(hf: nn.Module) -> list[nn.Module]:
    """Returns all blocks of `hf`, in the order of the model."""
    return [block for blocks in block_lists(hf) for block in blocks]


def _outermost(module: nn.Module) -> Iterator[nn.ModuleList]:
    """Yields the lists that no other list contains."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _outermost(child)


def _blocks_of(found: nn.ModuleList, named: frozenset[str]) -> list[nn.Module]:
    count = Counter(type(member) for member in found)
    return [
        member
        for member in dict.fromkeys(found)
        if (count[type(member)] > 1 or type(member).__name__ in named)
        and any(True for _ in member.children())
        and any(True for _ in member.parameters())
    ]


def embedding_of(hf: nn.Module) -> nn.Module | None:
    """Returns the input embedding if it is worth gathering alone: no other module has its weights."""
    embedding = hf.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding):
        return None
    own = {id(p) for p in embedding.parameters()}
    others = (p for module in hf.modules() if module is not embedding for p in module.parameters(recurse=False))
    return None if own & {id(p) for p in others} else embedding


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
    from torch._inductor.cpp_builder import get_cpp_compiler  # slow to import
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise ConfigError(
            "engine.fsdp.compile",
            True,
            "needs a C++ compiler, and there is none",
            "install g++ or clang++ (or name one in CXX), or set it to false",
        ) from None
