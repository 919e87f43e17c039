"""Operators of an update whose CUDA kernels add in an order that changes from run to run.

Sources: of what torch.use_deterministic_algorithms lists (torch 2.13) that which adds and a language model may use;
attention's backward passes, by their CUDA code, which takes another way under that switch. A sum along a row whose
elements are added to once each, as at a token's label in the vocabulary or at its experts, has no order.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

ATTENTION = {
    f"_{kind}_attention_backward"
    for kind in ("flash", "efficient", *(f"scaled_dot_product_{name}" for name in ("flash", "efficient", "cudnn")))
} | {"packed_attention_backward"}
"""A gradient of queries is added to by every block of keys, unless `torch.use_deterministic_algorithms` is on."""
ATOMIC = {
    "index_add", "index_add_", "index_reduce", "index_reduce_", "scatter_reduce", "scatter_reduce_", "put_", "histc",
    "bincount",
}  # fmt: skip
OF_ROWS = {"scatter_add", "scatter_add_"}  # along the rows themselves
OF_FLOATS = {"cumsum", "cumsum_"}


class Unordered(TorchDispatchMode):
    """Notes such operators on CUDA tensors, by name; transformer-engine's of experts' rows; and how often each is called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.found: set[str] = set()
        self.of_te: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        self.calls[name] += 1
        along_rows = name in OF_ROWS and args[1] % args[0].dim() == 0
        of_floats = name in OF_FLOATS and args[0].is_floating_point()
        if (name in ATTENTION | ATOMIC or along_rows or of_floats) and args[0].device.type == "cuda":
            self.found.add(name)
        if func.namespace == "te_moe":
            self.of_te.add(name)
        return func(*args, **(kwargs or {}))
