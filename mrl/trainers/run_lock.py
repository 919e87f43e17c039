"""One run at a time in an output_dir."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import socket

from filelock import FileLock, Timeout

from mrl.errors import NO_LOCKS, ConfigError, quoted, unwritable

logger = logging.getLogger(__name__)

NAME = ".lock"
WAIT_S = 10.0
"""The processes of a run that was just killed may take seconds to be gone, and hold the lock for so long."""

POLL_S = 0.1


def refuse_if_in_use(output_dir: pathlib.Path) -> None:
    """Raises ConfigError as `RunLock.acquire` does, if another run has the lock. Without one nothing is touched."""
    if (output_dir / NAME).exists():
        lock = RunLock(output_dir)
        lock.acquire()
        lock.release()


class RunLock:
    """The lock of a run on its directory, held by one process: two runs there would delete each other's checkpoints.

    The kernel holds it (flock) and releases it however the process ends. The file names the holder, and a release
    removes it. Linux extends flock over NFS; where it is of one machine only (mounted with local_lock or nolock), runs
    on two machines do not see each other.
    """

    def __init__(self, output_dir: pathlib.Path, wait_s: float = WAIT_S) -> None:
        self.output_dir, self.wait_s = output_dir, wait_s
        # a soft lock, which filelock would take where there is no flock, outlives a run that is killed
        self._lock = FileLock(output_dir / NAME, thread_local=False, fallback_to_soft=False)

    def acquire(self) -> None:
        """Takes the lock; raises ConfigError where another run still has it after `wait_s`, or there can be no folder.

        A file system that has no locks is warned about, and the run goes on without one.
        """
        try:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=self.wait_s, poll_interval=POLL_S)
        except Timeout:
            why = f"is in use by another run ({self._holder()})"
            fix = "wait for it, stop it, or give another output_dir"
            raise ConfigError("output_dir", quoted(str(self.output_dir)), why, fix) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise unwritable(str(self.output_dir), self.output_dir, error) from error
            logger.warning("output_dir: no lock in %s (%s): start no second run there", self.output_dir, error)
            return
        path = pathlib.Path(self._lock.lock_file)
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")

    def release(self) -> None:
        """Gives the lock back, if it is held here, and leaves nothing behind."""
        if self._lock.is_locked:
            with contextlib.suppress(OSError):  # nobody needs the file
                (self.output_dir / NAME).unlink()
            self._lock.release()

    def _holder(self) -> str:
        try:
            return (self.output_dir / NAME).read_text(encoding="utf-8")
        except OSError:  # it has just ended
            return "unknown"
