"""One process of the pool: how it is started, watched and killed.

It is started by executing Python again, not by fork: this process may hold torch's threads, a GPU and process groups.
It does not import the main module, so a script needs no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import struct
import subprocess
import sys
import time

import psutil

from mrl.rewards.worker import WorkerConfig

START = (
    # srun sends stop signals to every process of the job, and scoring must continue until the trainer has saved
    "import signal, sys; [signal.signal(s, signal.SIG_IGN) for s in (signal.SIGTERM, signal.SIGUSR1)]; "
    "sys.path[:] = {path!r}; from mrl.rewards.worker import main; main({connection}, {lifeline})"
)

WAIT_S = 5.0  # a process that the kernel cannot end, in a hanging file system, is left after this


@dataclasses.dataclass(eq=False)
class Process:
    """A process that calls functions, and its running calls."""

    process: subprocess.Popen[bytes]
    connection: multiprocessing.connection.Connection
    lifeline: int  # our end of the pipe at whose closing it dies
    running: dict[int, float] = dataclasses.field(
        default_factory=dict
    )  # call number -> deadline, of those not answered
    exclusive: bool = False  # takes no second call while one runs


def start(setup: WorkerConfig, send_timeout_s: float) -> Process:
    """Returns a new process that was sent `setup`; it answers what its functions are, or a ConfigError."""
    ours, theirs = multiprocessing.Pipe()
    read_end, write_end = os.pipe()
    fds = (theirs.fileno(), read_end)
    program = START.format(path=sys.path, connection=fds[0], lifeline=fds[1])
    try:
        child = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.DEVNULL, stdout=2, pass_fds=fds, start_new_session=True,
        )  # fmt: skip
    except BaseException:
        ours.close()
        os.close(write_end)
        raise
    finally:
        theirs.close()
        os.close(read_end)
    process = Process(child, ours, write_end)
    _limit_sends(ours, send_timeout_s)
    with contextlib.suppress(OSError):  # it is gone already, which reading from it will say
        ours.send(setup)
    return process


def _limit_sends(connection: multiprocessing.connection.Connection, time_s: float) -> None:
    """Makes a send fail after `time_s` if the other side does not read; it would wait for ever."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        seconds = int(time_s)
        micros = int((time_s - seconds) * 1e6)
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, micros))


def kill(process: Process) -> int:
    """Kills a process, its group and its other descendants. Returns its exit status: its own if it had ended."""
    descendants: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        descendants = psutil.Process(process.process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.process.pid, signal.SIGKILL)
    for descendant in descendants:
        with contextlib.suppress(psutil.Error):
            descendant.kill()
    process.connection.close()
    os.close(process.lifeline)
    status = process.process.wait()
    _wait_for(descendants)
    return status


def _wait_for(killed: list[psutil.Process]) -> None:
    """Waits, at most WAIT_S, until killed processes are gone. They are not our children, so a zombie counts as gone."""
    deadline = time.monotonic() + WAIT_S
    while any(map(_is_running, killed)) and time.monotonic() < deadline:
        time.sleep(0.01)


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def in_words(status: int) -> str:
    return f"exit status {status}" if status >= 0 else f"signal {-status}, {signal.Signals(-status).name}"
