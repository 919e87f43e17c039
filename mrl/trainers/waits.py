"""A word in every long wait: what a run is doing, and for how long, while it has nothing else to say."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator

from mrl.errors import UserError

SILENCE_S = 15.0
"""Seconds of silence after which a line is shown, again each time that so many more have passed."""


class WaitWatch:
    """Shows what the process is doing when nothing was shown for a while. A thread of its own keeps the time.

    write: shows a line; it is called in that thread.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._lock = threading.Lock()
        self._what, self._detail, self._began_s = "", "", 0.0
        self._silent_since_s = time.monotonic()
        self._ended: threading.Event | None = None

    def doing(self, what: str) -> None:
        """`what` begins now; where nothing was watched, the silence does too."""
        with self._lock:
            self._what, self._detail, self._began_s = what, "", time.monotonic()
            if self._ended is None:
                self._silent_since_s = self._began_s
                self._ended = threading.Event()
                threading.Thread(target=self._run, args=(self._ended,), name="mrl-waits", daemon=True).start()

    def detail(self, how_far: str) -> None:
        """Notes how far it is."""
        self._detail = how_far

    def reset(self) -> None:
        """Starts the silence anew: another line was shown."""
        with self._lock:
            self._silent_since_s = time.monotonic()

    def close(self) -> None:
        """Ends the thread, until `doing`. May be called twice."""
        with self._lock:
            if self._ended is not None:
                self._ended.set()
            self._ended = None

    def word(self, now_s: float) -> str | None:
        """Returns the line that is due at a time, or None."""
        with self._lock:
            if now_s - self._silent_since_s < SILENCE_S:
                return None
            self._silent_since_s = now_s
            detail = f": {self._detail}" if self._detail else ""
            return f"{self._what}{detail} ({now_s - self._began_s:.0f} s so far)"

    def _run(self, ended: threading.Event) -> None:
        while not ended.wait(0.25):
            word = self.word(time.monotonic())
            if word is not None and not ended.is_set():
                with contextlib.suppress(UserError, BrokenPipeError):  # the run's own next line says it
                    self._write(word)


def write_line(line: str) -> None:
    """Writes a line in one piece, unlike print: a signal's own line comes before or after it.

    Raises UserError if stdout is a pipe that nobody reads.
    """
    try:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    except BrokenPipeError as error:
        fix = "run the same command again, which goes on from the last checkpoint, if there is one"
        raise UserError("standard output", why="was closed, as by `| head`", fix=fix) from error


def write_error_line(line: str) -> None:
    """Writes a line as `write_line` does, to stderr: the stdout of such a command is its result."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


@contextlib.contextmanager
def announce(what: str, *, shows: bool, write: Callable[[str], None] = write_line) -> Iterator[WaitWatch]:
    """Inside, `what` is done by a process that has no console yet. Yields its watch. shows: False says nothing.

    It imports, mostly (`fewer_collections`).
    """
    watch = WaitWatch(write)
    if shows:
        watch.doing(what)
    try:
        with fewer_collections():
            yield watch
    finally:
        watch.close()


@contextlib.contextmanager
def fewer_collections() -> Iterator[None]:
    """Inside, Python collects garbage seldom: imports leave none, and looking for some takes a tenth of their time."""
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
