"""What a block's forward is wrapped in: compilation, recomputation in the backward pass, activations on the host.

    what                       keeps on the device, of each block      costs
    (nothing)                  all that its backward pass needs        nothing
    recompute full             its inputs                              another forward
    offload activations        nothing                                 a copy to the host and back of what it would keep
    both                       nothing                                 another forward, and copies of its inputs

FSDP gathers a block's weights before its forward and before its backward pass; the wrapped forward runs inside of that.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from mrl.config.schema import EngineConfig
from mrl.engine.fsdp.blocks import block_lists
from mrl.errors import ConfigError


def wrap_blocks(hf: nn.Module, engine: EngineConfig) -> ActivationOffload | None:
    """Wraps each block's forward as the config says. Returns what holds activations, where they are offloaded."""
    lists = block_lists(hf)
    if engine.fsdp.compile:
        _check_compiler()
        # blocks of one class share their code; of each there may be several versions, as for windows of attention
        limit = 4 * sum(map(len, lists))
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, limit)
    offload = ActivationOffload() if "activations" in engine.offload else None
    for blocks in lists:
        for number, block in enumerate(blocks):
            if engine.fsdp.compile:
                block.forward = torch.compile(block.forward)
            if engine.recompute == "full" and number % engine.recompute_every == 0:
                block.forward = functools.partial(_recomputed, block.forward)
            if offload is not None:
                block.forward = functools.partial(_offloaded, block, block.forward, offload)
    return offload


def _recomputed(forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _offloaded(block: nn.Module, forward: Any, offload: ActivationOffload, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    with offload.of(block):
        return forward(*args, **kwargs)


class ActivationOffload:
    """Copies what blocks save for their backward pass to the host, and back when it is needed.

    Weights stay: FSDP gathers them again. on_host: bytes that wait there now; most: the most there were.
    """

    def __init__(self) -> None:
        self.on_host = self.most = 0

    @contextlib.contextmanager
    def of(self, block: nn.Module) -> Iterator[None]:
        """Inside, saved tensors that are no weights of `block` go to the host; so do those of a unit within it."""
        gathered = (p for p in block.parameters() if not isinstance(p, DTensor))
        weights = {p.untyped_storage().data_ptr() for p in gathered}
        pack = functools.partial(self.pack, weights)
        with torch.autograd.graph.saved_tensors_hooks(pack, self.unpack):
            yield

    def pack(self, weights: set[int], tensor: Tensor) -> Tensor | Parked:
        """Returns what autograd keeps in place of `tensor`."""
        if tensor.untyped_storage().data_ptr() in weights:
            return tensor
        return Parked(self, tensor)

    def unpack(self, kept: Tensor | Parked) -> Tensor:
        return kept.tensor() if isinstance(kept, Parked) else kept


class Parked:
    """A tensor's copy on the host."""

    def __init__(self, offload: ActivationOffload, tensor: Tensor) -> None:
        self.offload, self.device = offload, tensor.device
        self.host = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda"
        )
        self.host.copy_(tensor, non_blocking=True)  # in the order of the stream, as is the way back
        offload.on_host += self.host.untyped_storage().nbytes()
        offload.most = max(offload.most, offload.on_host)

    def tensor(self) -> Tensor:
        """Returns a new copy on the device."""
        new = torch.empty_strided(self.host.size(), self.host.stride(), dtype=self.host.dtype, device=self.device)
        return new.copy_(self.host, non_blocking=True)

    def __del__(self) -> None:
        self.offload.on_host -= self.host.untyped_storage().nbytes()


def _check_compiler() -> None:
    """torch.compile makes C++ for a CPU, and for a GPU what launches its kernels."""
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise ConfigError(
            "engine.fsdp.compile",
            True,
            "needs a C++ compiler, and there is none",
            "install g++ or clang++ (or name one in CXX), or set it to false",
        ) from None
