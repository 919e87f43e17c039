"""Bytes done, of how many, and how fast: one line on a terminal that keeps changing, and one at the end everywhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from mrl.convert.workspace import in_words

EVERY_S = 0.1
WIDTH = 30


class ProgressBar:
    """Called with the bytes in all, gives what is told of bytes done, from any thread. verb: as in "imported"."""

    def __init__(self, verb: str, stream: TextIO | None = None) -> None:
        self.verb, self.stream = verb, stream or sys.stderr
        self.total = self.done = 0
        self._lock, self._shown, self._begun = threading.Lock(), 0.0, time.monotonic()
        self._last = self._begun

    def __call__(self, total: int) -> Callable[[int], None]:
        self.total, self.done, self._begun = total, 0, time.monotonic()
        return self._advance

    def _advance(self, count: int) -> None:
        with self._lock:
            self.done += count
            now = self._last = time.monotonic()
            if self.stream.isatty() and now - self._shown >= EVERY_S:
                self._shown = now
                full = WIDTH * self.done // max(self.total, 1)
                self.stream.write(f"\r[{'#' * full}{'.' * (WIDTH - full)}] {self._words()}\033[K")
                self.stream.flush()

    def _words(self) -> str:
        seconds = max(self._last - self._begun, 1e-3)
        return f"{in_words(self.done)} of {in_words(self.total)}, {in_words(self.done / seconds)}/s"

    def close(self) -> None:
        """Ends the line."""
        if self.stream.isatty() and self._shown:
            self.stream.write("\r\033[K")
        if self.total and self.done >= self.total:
            self.stream.write(f"{self.verb} {self._words()}\n")
        self.stream.flush()

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
