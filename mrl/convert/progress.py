"""Bytes done, of how many, and how fast: on a terminal a line that keeps changing, elsewhere a line now and then, and one at the end."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from mrl.convert.workspace import in_words

EVERY_S, PLAIN_EVERY_S = 0.1, 10.0
WIDTH = 30


class ProgressBar:
    """Called with the bytes in all, gives what is told of bytes done, from any thread. verb: as in "imported"."""

    def __init__(self, verb: str, stream: TextIO | None = None) -> None:
        self.verb, self.stream = verb, stream or sys.stderr
        self.total = self.done = 0
        self._lock, self._begun = threading.Lock(), time.monotonic()
        self._last = self._shown = self._begun

    def __call__(self, total: int) -> Callable[[int], None]:
        self.total, self.done, self._begun = total, 0, time.monotonic()
        self._shown = self._begun
        return self._advance

    def _advance(self, count: int) -> None:
        with self._lock:
            self.done += count
            now = self._last = time.monotonic()
            terminal = self.stream.isatty()
            if now - self._shown < (EVERY_S if terminal else PLAIN_EVERY_S):
                return
            self._shown = now
            full = WIDTH * self.done // max(self.total, 1)
            bar = f"\r[{'#' * full}{'.' * (WIDTH - full)}] {self._words()}\033[K"
            self.stream.write(bar if terminal else f"{self.verb} {self._words()}\n")
            self.stream.flush()

    def _words(self) -> str:
        seconds = max(self._last - self._begun, 1e-3)
        return f"{in_words(self.done)} of {in_words(self.total)}, {in_words(self.done / seconds)}/s"

    def close(self) -> None:
        """Ends the line."""
        if self.stream.isatty() and self._shown > self._begun:
            self.stream.write("\r\033[K")
        if self.total and self.done >= self.total:
            self.stream.write(f"{self.verb} {self._words()}\n")
        self.stream.flush()

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
