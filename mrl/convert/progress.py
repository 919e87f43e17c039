"""Tells how many bytes of a conversion are done, and how fast: a line now and then, and one at its end."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from rich.filesize import decimal

EVERY_S = 10.0


class ProgressLines:
    """Shows a conversion's progress. A call with the bytes in all returns a function that takes bytes done, in any
    thread.

    verb: as in "imported".
    """

    def __init__(self, verb: str, stream: TextIO = sys.stderr) -> None:
        self.verb, self.stream = verb, stream
        self._lock = threading.Lock()

    def __call__(self, total: int) -> Callable[[int], None]:
        self.total, self.done = total, 0
        self._begun = self._shown = time.monotonic()
        return self._advance

    def _advance(self, count: int) -> None:
        with self._lock:
            self.done += count
            now = time.monotonic()
            if now - self._shown >= EVERY_S or self.done == self.total:
                self._shown = now
                speed = int(self.done / max(now - self._begun, 1e-3))
                line = f"{self.verb} {decimal(self.done)} of {decimal(self.total)}, {decimal(speed)}/s"
                print(line, file=self.stream, flush=True)
