"""Counts bytes of tensors that are alive at once, as operators make them and as their memory is freed."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode


class PeakBytes(TorchDispatchMode):
    """Counts bytes that are made inside: `peak` is the most alive at once, `largest` the most of one storage.

    device: the device to count, all if None. block: storages are counted in multiples of it. Memory that an operator
    uses while it runs is not seen. Nor is memory for the parts of tensor subclasses, except fake tensors.
    """

    def __init__(self, device: str | None = None, block: int = 1) -> None:
        super().__init__()
        self.device, self.block = device, block
        self.peak = self.largest = self.alive = 0
        self._storages: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = _tensors((*args, *(kwargs or {}).values()))
        # subclasses with __tensor_flatten__ have no storage
        before = {t.untyped_storage()._cdata for t in given if not hasattr(t, "__tensor_flatten__")}
        for tensor in _tensors((out,)):
            if type(tensor) in (Tensor, torch.nn.Parameter, FakeTensor) and self.device in (None, tensor.device.type):
                self._note(tensor.untyped_storage(), before)
        return out

    def _note(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        key, size = storage._cdata, -(-storage.nbytes() // self.block) * self.block
        if key not in self._storages:
            if key in before:
                return
            weakref.finalize(storage, self._gone, key)
        self.alive += size - self._storages.get(key, 0)  # a known storage may have been resized
        self._storages[key] = size
        self.peak, self.largest = max(self.peak, self.alive), max(self.largest, size)

    def _gone(self, key: int) -> None:
        self.alive -= self._storages.pop(key)


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yields the tensors that an operator takes or gives: torch's own tree_leaves takes a fifth of a pass of shapes."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
