"""Signals that ask a run to stop: they are remembered, and the trainer acts on them between steps."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import types
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
APART_S = 5.0
"""A signal so long after the first is another request. One may come twice at once: from Slurm, and from a launcher."""


_end_with_process = False


def ignore_after_stop() -> None:
    """This process ends after its run: a signal that comes after the run has answered one does nothing."""
    global _end_with_process
    _end_with_process = True


class StopSignal:
    """Inside `with`, SIGTERM and SIGUSR1 set `name` and say so. Another one, APART_S later, sets `hurried`.

    says: what follows, in words: the first one is answered at once with that line on standard output; None: with
    nothing. SIGTERM is what schedulers and `kill` send; SIGUSR1 is what Slurm sends ahead of a time limit
    (`--signal=USR1@60`).
    """

    def __init__(self, says: str | None = None) -> None:
        self.says = says
        self.name: str | None = None
        self.hurried = False
        self._first_s = 0.0
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        return self.name is not None

    @property
    def number(self) -> int:
        """The signal's number; 0 where none came."""
        return 0 if self.name is None else int(signal.Signals[self.name])

    def __enter__(self) -> "StopSignal":
        self._before = {signum: signal.signal(signum, self._remember) for signum in STOP_SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, signal.SIG_IGN if self.requested and _end_with_process else handler)

    def _remember(self, signum: int, frame: types.FrameType | None) -> None:
        if self.name is not None:
            self.hurried |= time.monotonic() - self._first_s >= APART_S
            return
        self._first_s = time.monotonic()
        self.name = signal.Signals(signum).name
        if self.says is not None:
            with contextlib.suppress(OSError):  # a terminal that is gone must not keep the run from saving
                clear = "\r\x1b[2K" if os.isatty(1) else ""  # of a progress bar, which is drawn again below
                # Not by print: the signal may have come in the middle of one.
                os.write(1, f"{clear}received {self.name}: {self.says}\n".encode())
