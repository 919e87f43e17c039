"""Operations that are dispatched on CUDA tensors: what a GPU is asked to launch, by operator and by line of code."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from tests.cuda import fake  # before torch: it says what torch is here

import torch  # isort: skip
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LAUNCH_NOTHING = {
    "_unsafe_view", "device", "empty", "empty_like", "empty_strided", "is_same_size", "new_empty", "new_empty_strided",
    "resize_", "set_", "unsafe_split",
}  # fmt: skip
"""Operators that move and compute nothing, beside those that torch's schemas call views."""


class Operations(TorchDispatchMode):
    """Counts operations without views and allocations. lines: whether their lines of code are noted, too."""

    def __init__(self, *, lines: bool = False) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.lines: Counter[str] = Counter()
        self.captured: Counter[str] = Counter()  # of CUDA graphs, among the operators
        self._notes_lines = lines

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if func.is_view or name in LAUNCH_NOTHING:
            return out
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
        if any(t.device.type == "cuda" for t in tensors):
            self.operators[name] += 1
            if fake.Graph.capturing:
                self.captured[name] += 1
            if self._notes_lines:
                self.lines[f"{name} @ {_line()}"] += 1
        return out


def _line() -> str:
    """Returns the innermost line of a model's or an engine's code; in a backward pass its autograd node before it."""
    node = torch._C._current_autograd_node()
    name = "" if node is None else f"backward {node.name().split('::')[-1]} "
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        package = next(
            (p for p in ("/mrl/", "/megatron/core/", "/transformers/", "/transformer_engine/") if p in file), ""
        )
        if package and "peak_bytes" not in file:
            return f"{name}{file[file.rfind(package) + 1 :]}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return name
