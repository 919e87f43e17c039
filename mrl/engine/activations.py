"""`engine.offload: [activations]` moves activations to host memory until the backward pass reads them.

Both engines have it: the FSDP engine for each block, the Megatron engine for a chunk's layers and for each MTP layer.
Autograd's hooks on saved tensors do it, so it works with every layer spec, layout and kernel. Tensors come back with
the values, shape and strides that they were saved with. With recomputation only inputs are saved, and these are moved.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

PLAIN = (Tensor, nn.Parameter, FakeTensor)
"""Tensors with their values in their storage. Other subclasses have them elsewhere: transformer-engine's 8-bit copies
of weights have scales too, and would come back as tensors of the dtype that they stand for."""


class ActivationOffload:
    """Copies saved activations to the host, and back when the backward pass needs them.

    Weights stay on the device, and so do their 8-bit copies. on_host: bytes that are on the host now. most: their
    maximum so far.
    """

    def __init__(self) -> None:
        self.on_host = self.most = 0

    def wrap(self, module: nn.Module) -> None:
        """Has the forward of `module` save to the host."""
        module.forward = functools.partial(self._forward, module, module.forward)

    def _forward(self, module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with self.of(module):
            return forward(*args, **kwargs)

    @contextlib.contextmanager
    def of(self, module: nn.Module) -> Iterator[None]:
        """Moves saved tensors to the host inside, except weights of `module`. Nested modules work too."""
        whole = (p for p in module.parameters() if not isinstance(p, DTensor))
        weights = {p.untyped_storage()._cdata for p in whole}
        pack = functools.partial(self.pack, weights)
        with torch.autograd.graph.saved_tensors_hooks(pack, self.unpack):
            yield

    def pack(self, weights: set[int], tensor: Tensor) -> Tensor | HostTensor:
        """Returns the object that autograd keeps instead of `tensor`."""
        if type(tensor) not in PLAIN or tensor.untyped_storage()._cdata in weights:
            return tensor
        return HostTensor(self, tensor)

    def unpack(self, kept: Tensor | HostTensor) -> Tensor:
        return kept.tensor() if isinstance(kept, HostTensor) else kept


class HostTensor:
    """Holds a tensor's copy on the host, or only its sizes if the tensor is on the meta device."""

    def __init__(self, offload: ActivationOffload, tensor: Tensor) -> None:
        self.offload, self.device, self.dtype = offload, tensor.device, tensor.dtype
        self.size, self.stride = tensor.size(), tensor.stride()
        once = _once(tensor)
        self.bytes = once.numel() * once.element_size()
        self.host: Tensor | None = None
        if not tensor.is_meta:
            self.host = torch.empty(once.size(), dtype=self.dtype, pin_memory=tensor.is_cuda)
            # copies between contiguous pinned memory run in the order of the stream, so the host does not wait
            self.host.copy_(once.contiguous(), non_blocking=True)
        offload.on_host += self.bytes
        offload.most = max(offload.most, offload.on_host)

    def tensor(self) -> Tensor:
        """Returns a new copy on the device, laid out as the tensor was: kernels may add otherwise for others."""
        new = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
        if self.host is not None:
            once = _once(new)
            there = self.host if once.is_contiguous() else self.host.to(self.device, non_blocking=True)
            once.copy_(there, non_blocking=True)
        return new

    def __del__(self) -> None:
        self.offload.on_host -= self.bytes


def _once(tensor: Tensor) -> Tensor:
    """Returns a view that has each element of an expanded tensor once."""
    for dim, (size, stride) in enumerate(zip(tensor.size(), tensor.stride(), strict=True)):
        tensor = tensor.narrow(dim, 0, 1) if size > 1 and stride == 0 else tensor
    return tensor
