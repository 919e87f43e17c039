"""Moves parameters, gradients and optimizer state between the device and host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any


class Offload:
    def __init__(self, kinds: Sequence[str], chunks: Sequence[Any], optimizer: Any) -> None:
        self.kinds, self.chunks, self.optimizer = frozenset(kinds), chunks, optimizer

    def bring(self, *, gradients: bool, optimizer: bool) -> None:
        pass

    def put_back(self) -> None:
        pass

    @contextlib.contextmanager
    def used(self, *, gradients: bool, optimizer: bool) -> Iterator[None]:
        yield
