"""Runs `mrl` in forks of this process, which has imported what takes ten seconds to import. Ranks that it launches are forks, too.

A line of stdin is [folder, output, errors, environment, arguments], which is answered with the pid of a new fork, or the pid of one, which is
answered with its exit code, or with null while it runs.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

REPO = Path(__file__).parents[1]


class Forked:
    """A fork, as `subprocess.Popen` has it."""

    def __init__(self, forks: Forks, pid: int) -> None:
        self.forks, self.pid = forks, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.forks.ask(self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("mrl", timeout)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(15)


class Rank:
    """A rank that a forked launcher starts, as `subprocess.Popen` has it: a fork of the launcher."""

    def __init__(self, folder: str, environment: Mapping[str, str]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                rank(folder, environment)
            finally:
                os._exit(1)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
            time.sleep(0.005)
        return code


def rank(folder: str, environment: Mapping[str, str]) -> None:
    """Becomes a rank of `mrl.launch.local`; does not return."""
    from mrl.launch import worker

    os.setsid()
    weakref.finalize._registry.clear()  # the launcher's folders are not this process's to remove
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["mrl.launch.worker", folder]
    worker.main()


def fork_ranks() -> None:
    """From here on torch elastic forks ranks in place of starting Python for each."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    def popen(handler: SubprocessHandler, args: Sequence[str], environment: Mapping[str, str]) -> Rank:
        assert args[-2] == "mrl.launch.worker", args
        return Rank(args[-1], environment)

    SubprocessHandler._popen = popen


class Forks:
    """The process that is forked; it ends with the one that has started it.

    Variables that packages read when they are imported are set here, for all commands: in a command's own environment they
    come too late. So copies of rows lie in one folder, which is not the user's cache."""

    def __init__(self) -> None:
        self.cache = tempfile.TemporaryDirectory(prefix="forks")
        own = {"PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": self.cache.name}
        own |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.forks"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPO,
            env=os.environ | own,
        )  # fmt: skip

    def ask(self, what: object) -> int | None:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(what), file=self.process.stdin, flush=True)
        answer: int | None = json.loads(self.process.stdout.readline())
        return answer

    def start(
        self,
        folder: Path,
        log: Path,
        environment: Mapping[str, str],
        arguments: Sequence[str],
        errors: Path | None = None,
    ) -> Forked:
        """Starts `mrl ARGUMENTS` in a folder. What it prints goes to the end of a log; errors: what it says on stderr, if apart."""
        pid = self.ask([str(folder), str(log), str(errors or log), dict(environment), list(arguments)])
        assert pid is not None
        return Forked(self, pid)


@functools.cache
def forks() -> Forks:
    """The one of this process; it starts when it is first asked for."""
    return Forks()


def main() -> None:
    import mrl.cli  # noqa: F401
    import mrl.engine.fsdp.engine  # noqa: F401
    import mrl.engine.megatron.engine  # noqa: F401
    import mrl.launch.local  # noqa: F401
    import mrl.serve.server  # noqa: F401
    import mrl.trainers.ppo  # noqa: F401
    import mrl.trainers.sft  # noqa: F401
    import tests.frozen  # noqa: F401

    fork_ranks()

    for line in sys.stdin:
        asked = json.loads(line)
        if isinstance(asked, int):
            pid, status = os.waitpid(asked, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        elif (answer := os.fork()) == 0:
            run(*asked)
        print(json.dumps(answer), flush=True)


def run(folder: str, output: str, errors: str, environment: dict[str, str], arguments: list[str]) -> None:
    """Becomes `mrl ARGUMENTS`; does not return."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for fd, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), fd)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)  # as of `python -u`, with nothing of this process in it
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    sys.argv = ["mrl", *arguments]

    from mrl.cli import command

    command()
    os._exit(0)


if __name__ == "__main__":
    main()
