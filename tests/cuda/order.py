"""Operators of an update whose CUDA kernels add in an order that changes from run to run.

Source: what torch.use_deterministic_algorithms lists (torch 2.13), of what adds: atomic additions. Where each element is
added to once at most, as along the vocabulary for a token's label, there is no order, and nothing is listed.
"""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

ATTENTION = {
    f"_{kind}_attention_backward"
    for kind in ("flash", "efficient", "scaled_dot_product_flash", "scaled_dot_product_efficient")
}
"""A gradient of queries is added to by every block of keys, unless `torch.use_deterministic_algorithms` is on."""
ATOMIC = {"index_add", "index_add_", "index_reduce", "index_reduce_", "scatter_reduce", "scatter_reduce_"}
ALONG_ONE = {"scatter_add", "scatter_add_"}
"""Of a row's own numbers, if not along the rows."""


class Unordered(TorchDispatchMode):
    """Notes such operators on CUDA tensors, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        along_rows = name in ALONG_ONE and args[1] % args[0].dim() == 0
        if (name in ATTENTION | ATOMIC or along_rows) and args[0].device.type == "cuda":
            self.found.add(name)
        return func(*args, **(kwargs or {}))
