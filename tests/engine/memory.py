"""Bytes of tensors that are alive at once: counted as operators make them and as their memory is given back, not timed."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """Inside, `peak` is the most bytes that were alive of what was made inside, and `largest` the most of one storage.

    What an operator uses while it runs is not seen, nor what one that takes tensor subclasses makes of their parts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.largest = self._alive = 0
        self._storages: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(out):
            if type(tensor) in (Tensor, torch.nn.Parameter):
                self._note(tensor.untyped_storage(), before)
        return out

    def _note(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages or key in before:
            return
        self._storages[key] = size
        weakref.finalize(storage, self._gone, key)
        self._alive += size
        self.peak, self.largest = max(self.peak, self._alive), max(self.largest, size)

    def _gone(self, key: int) -> None:
        self._alive -= self._storages.pop(key)
