"""One run at a time in an output_dir."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import pathlib
import socket
import time

from mrl.errors import ConfigError, unwritable

logger = logging.getLogger(__name__)

NAME = ".lock"
WAIT_S = 10.0
"""The processes of a run that was just killed may take seconds to be gone, and hold the lock for so long."""

POLL_S = 0.1


class RunLock:
    """The lock of a run on its directory, held by one process: two runs there would delete each other's checkpoints.

    The kernel holds it (flock) and releases it however the process ends; the file is there to be locked, names the
    holder, and is removed at a release with the folders that were made for it, where nothing else has come into them.
    Linux extends flock over NFS. A file system that has none is warned about once, and the run goes on without a lock;
    where flock is of one machine only (mounted with local_lock or nolock), runs on two machines do not see each other.
    """

    def __init__(self, output_dir: pathlib.Path, wait_s: float = WAIT_S) -> None:
        self.output_dir, self.wait_s = output_dir, wait_s
        self._descriptor: int | None = None
        self._made: list[pathlib.Path] = []
        self._gone: FileNotFoundError | None = None

    def acquire(self) -> None:
        """Takes the lock; raises ConfigError where another run still has it after `wait_s`, or there can be no folder."""
        self._made = [folder for folder in (self.output_dir, *self.output_dir.parents) if not folder.exists()]
        deadline = time.monotonic() + self.wait_s
        while not self._try():
            if time.monotonic() > deadline:
                if self._gone is not None:
                    raise unwritable(str(self.output_dir), self.output_dir, self._gone)
                raise ConfigError(
                    f"output_dir: value {str(self.output_dir)!r} is in use by another run ({self._holder()}); "
                    "wait for it, stop it, or give another output_dir"
                )
            time.sleep(POLL_S)

    def release(self) -> None:
        """Gives the lock back, if it is held here, and leaves nothing behind."""
        if self._descriptor is None:
            return
        self._remove()
        os.close(self._descriptor)
        self._descriptor = None

    def _try(self) -> bool:
        path = self.output_dir / NAME
        try:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError as error:  # a run that ended has just removed the folder; or none can be made there
            self._gone = error
            return False
        except OSError as error:
            raise ConfigError(
                f"output_dir: value {str(self.output_dir)!r} cannot be locked ({error}); give a folder that can be written"
            ) from error
        self._gone = None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError as error:
            os.close(descriptor)
            self._remove()
            logger.warning("output_dir: no lock in %s (%s): start no second run there", self.output_dir, error)
            return True
        if not _is_at(descriptor, path):  # the file of a run that has just ended and removed it
            os.close(descriptor)
            return False
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        self._descriptor = descriptor
        return True

    def _holder(self) -> str:
        with contextlib.suppress(OSError):
            return (self.output_dir / NAME).read_text(encoding="utf-8") or "unknown"
        return "unknown"

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.output_dir / NAME)
        with contextlib.suppress(OSError):  # it is not empty
            for folder in self._made:
                folder.rmdir()


def _is_at(descriptor: int, path: pathlib.Path) -> bool:
    """Whether `path` is still the file that was opened."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
