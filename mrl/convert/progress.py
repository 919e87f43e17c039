"""Shows bytes done, of how many, and how fast: a bar on a terminal, elsewhere a line now and then. Both end with a
line."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

from rich.filesize import decimal

PLAIN_EVERY_S = 10.0


class ProgressBar:
    """Shows a conversion's progress. A call with the bytes in all returns a function that takes bytes done, in any
    thread.

    verb: as in "imported". stream: stderr by default.
    """

    def __init__(self, verb: str, stream: TextIO | None = None) -> None:
        self.verb, self.stream = verb, stream or sys.stderr
        self.total = self.done = 0
        self._lock = threading.Lock()
        self._bar: Any = None  # rich's, on a terminal

    def __call__(self, total: int) -> Callable[[int], None]:
        self.total, self.done = total, 0
        if self.stream.isatty():
            from rich import progress  # slow to import
            from rich.console import Console

            columns = progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn()
            bar = progress.Progress(*columns, console=Console(file=self.stream), transient=True)
            self._task = bar.add_task("", total=total)
            bar.start()
            self._bar = bar
        self._begun = self._shown = self._last = time.monotonic()
        return self._advance

    def _advance(self, count: int) -> None:
        with self._lock:
            self.done, self._last = self.done + count, time.monotonic()
            if self._bar is not None:
                self._bar.update(self._task, completed=self.done)
            elif self._last - self._shown >= PLAIN_EVERY_S:
                self._shown = self._last
                self._write_line()

    def _write_line(self) -> None:
        speed = int(self.done / max(self._last - self._begun, 1e-3))
        self.stream.write(f"{self.verb} {decimal(self.done)} of {decimal(self.total)}, {decimal(speed)}/s\n")
        self.stream.flush()

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self.total and self.done >= self.total:
            self._write_line()
