"""A pool of processes that call reward functions: each call has a time limit, and a process that hangs or dies is
replaced.

The processes are started by executing Python afresh, not by fork: this process may hold torch's threads, a GPU and
process groups. They do not import the main module, so a script needs no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import collections
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
import weakref
from collections.abc import Callable, Sequence

import psutil

from mrl.config.rewards import FunctionReward, Reward
from mrl.errors import ConfigError
from mrl.rewards.text import Prompt, Row
from mrl.rewards.worker import Answer, Call, NotReady, Ready, Setup

START_TIMEOUT_S = 300.0  # loading the user's file, which may import much
GRACE_S = 1.0  # an async function ends itself at the time limit; its process is killed this much later
START = "import sys; sys.path[:] = {path!r}; from mrl.rewards.worker import main; main({connection}, {lifeline})"


@dataclasses.dataclass(frozen=True)
class Task:
    """One call: of the reward with index `function`."""

    function: int
    prompt: Prompt
    completion: str
    row: Row


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A finite value, or what went wrong."""

    value: float | None
    fault: str | None = None
    timed_out: bool = False


@dataclasses.dataclass(eq=False)
class _Process:
    process: subprocess.Popen[bytes]
    connection: multiprocessing.connection.Connection
    lifeline: int
    running: dict[int, float] = dataclasses.field(default_factory=dict)  # call number -> deadline
    exclusive: bool = False  # takes no second call beside the one that runs


class RewardPool:
    """Processes that call the functions of `rewards`, which come with their config keys. Raises ConfigError where a function
    cannot be loaded. `concurrency`: calls of async functions at a time in a process."""

    def __init__(
        self, rewards: Sequence[tuple[str, Reward]], *, workers: int, timeout_s: float, concurrency: int = 16
    ) -> None:
        self._setup = Setup(tuple(rewards), timeout_s)
        self._concurrency = concurrency
        self._processes: list[_Process] = []
        self._finalizer = weakref.finalize(self, _kill_all, self._processes, os.getpid())
        self._asynchronous: tuple[bool, ...] = ()
        self._workers = workers
        self._next_number = 0
        try:
            self._fill()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills the processes and all that they started. The pool cannot be used afterwards."""
        self._finalizer()

    @property
    def pids(self) -> list[int]:
        return [p.process.pid for p in self._processes]

    def run(
        self, tasks: Sequence[Task], *, fatal: Callable[[Task, Outcome], bool] = lambda task, outcome: False
    ) -> list[Outcome | None]:
        """The outcomes, in the order of `tasks`.

        fatal: asked of each fault, whether it ends the run. No task after it is started then, and outcomes after it may be
        None; all tasks before it have theirs, so the first fatal fault does not depend on which process was faster.

        A call that shares a process with others when it hangs or dies is called a second time, alone.
        """
        if not self._finalizer.alive:
            raise RuntimeError("the reward pool is closed")
        run = _Run(tasks, fatal, self._next_number)
        self._next_number += len(tasks)
        try:
            while run.unfinished:
                self._fill()
                self._dispatch(run)
                self._collect(run)
        finally:
            for process in [p for p in self._processes if p.running]:
                self._drop(process)
        return run.outcomes

    # ----------------------------------------------------------------------------------------------- the processes

    def _fill(self) -> None:
        """Starts the processes that are missing and waits until they are ready."""
        started = [self._start() for _ in range(self._workers - len(self._processes))]
        deadline = time.monotonic() + START_TIMEOUT_S
        for process in started:
            reply, ended = None, False
            with contextlib.suppress(EOFError, OSError):
                if ended := process.connection.poll(max(0.0, deadline - time.monotonic())):
                    reply = process.connection.recv()
            if isinstance(reply, NotReady):
                raise ConfigError(reply.config_error)
            if not isinstance(reply, Ready):
                raise ConfigError(self._not_loaded(process, ended))
            self._asynchronous = reply.asynchronous

    def _not_loaded(self, process: _Process, ended: bool) -> str:
        """The message for a process that went, or took too long, before it was ready."""
        status = self._drop(process)
        how = f"ended the process ({_status(status)})" if ended else f"took longer than {START_TIMEOUT_S:g} s"
        files = [f"{k}.function: {r.function}" for k, r in self._setup.rewards if isinstance(r, FunctionReward)]
        return f"{', '.join(files) or 'rewards'}: loading {how}; import the files in a Python prompt to see why"

    def _start(self) -> _Process:
        ours, theirs = multiprocessing.Pipe()
        read_end, write_end = os.pipe()
        fds = (theirs.fileno(), read_end)
        start = START.format(path=sys.path, connection=fds[0], lifeline=fds[1])
        try:
            child = subprocess.Popen(
                [sys.executable, "-c", start],
                stdin=subprocess.DEVNULL, stdout=2, pass_fds=fds, start_new_session=True,
            )  # fmt: skip
        except BaseException:
            ours.close()
            os.close(write_end)
            raise
        finally:
            theirs.close()
            os.close(read_end)
        process = _Process(child, ours, write_end)
        _limit_sends(ours, self._setup.timeout_s + GRACE_S)
        self._processes.append(process)
        with contextlib.suppress(OSError):  # it is gone already; `_fill` says so
            ours.send(self._setup)
        return process

    def _drop(self, process: _Process) -> int:
        """Kills a process; its exit status, which is its own where it had ended."""
        self._processes.remove(process)
        return _kill(process)

    # ---------------------------------------------------------------------------------------------------- the calls

    def _dispatch(self, run: _Run) -> None:
        """Gives tasks to processes until all have what they can take."""
        while (index := run.peek()) is not None:
            task = run.tasks[index]
            waits = self._asynchronous[task.function]
            shared = waits and index not in run.alone
            process = self._process_for(shared)
            if process is None:
                return
            run.take()
            number = run.first + index
            process.running[number] = time.monotonic() + self._setup.timeout_s + (GRACE_S if waits else 0.0)
            process.exclusive = not shared
            try:
                process.connection.send(Call(number, task.function, task.prompt, task.completion, task.row))
            except OSError:  # it died since its last call, or does not read
                blamed = index in run.alone and len(process.running) == 1
                self._fail(run, process, "does not take calls" if blamed else None, again=not blamed)
                return

    def _process_for(self, shared: bool) -> _Process | None:
        """The process with the fewest calls that can take one more."""
        limit = self._concurrency if shared else 1
        free = [p for p in self._processes if len(p.running) < limit and not (p.running and p.exclusive)]
        return min(free, key=lambda p: len(p.running), default=None)

    def _collect(self, run: _Run) -> None:
        """Waits for answers, deaths or the next deadline, and takes what there is."""
        busy = {p.connection: p for p in self._processes if p.running}
        if not busy:
            return
        soonest = min(deadline for p in busy.values() for deadline in p.running.values())
        ready = multiprocessing.connection.wait(list(busy), max(0.0, soonest - time.monotonic()))
        for connection in ready:
            process = busy[connection]
            try:
                answer: Answer = connection.recv()
            except (EOFError, OSError):
                self._fail(run, process, None)
                continue
            del process.running[answer.number]
            run.finish(answer.number, Outcome(answer.value, answer.fault, answer.timed_out))
        now = time.monotonic()
        for connection, process in busy.items():
            if connection not in ready and min(process.running.values()) <= now:
                self._fail(run, process, f"took longer than {self._setup.timeout_s:g} s", timed_out=True)

    def _fail(
        self, run: _Run, process: _Process, fault: str | None, *, timed_out: bool = False, again: bool = False
    ) -> None:
        """A process hung, or died (fault: None). Of several calls that it ran, each is tried again alone."""
        numbers = list(process.running)
        status = self._drop(process)
        if again or len(numbers) > 1:
            run.again(numbers)
        else:
            run.finish(numbers[0], Outcome(None, fault or f"ended its process ({_status(status)})", timed_out))


class _Run:
    """The tasks of one `RewardPool.run`: which wait, which are to run alone, and what came of them. Processes know a task
    as the number `first + index`, so an answer is never taken for another run's."""

    def __init__(self, tasks: Sequence[Task], fatal: Callable[[Task, Outcome], bool], first: int) -> None:
        self.tasks, self.fatal, self.first = tasks, fatal, first
        self.outcomes: list[Outcome | None] = [None] * len(tasks)
        self.alone: set[int] = set()
        self._retries: collections.deque[int] = collections.deque()
        self._next = 0
        self._end = self._missing = len(tasks)  # tasks from _end on are not wanted; _missing counts those before

    @property
    def unfinished(self) -> bool:
        return self._missing > 0

    def peek(self) -> int | None:
        """Index of the task to start next."""
        while self._retries and self._retries[0] >= self._end:
            self._retries.popleft()
        if self._retries:
            return self._retries[0]
        return self._next if self._next < self._end else None

    def take(self) -> int:
        if self._retries:
            return self._retries.popleft()
        self._next += 1
        return self._next - 1

    def again(self, numbers: Sequence[int]) -> None:
        indices = sorted(number - self.first for number in numbers)
        self.alone.update(indices)
        self._retries.extend(indices)

    def finish(self, number: int, outcome: Outcome) -> None:
        index = number - self.first
        self.outcomes[index] = outcome
        self._missing -= index < self._end
        if outcome.fault is not None and index < self._end and self.fatal(self.tasks[index], outcome):
            self._end = index
            self._missing = sum(o is None for o in self.outcomes[:index])


def _limit_sends(connection: multiprocessing.connection.Connection, time_s: float) -> None:
    """Lets a send that the other side does not read fail after `time_s`; it would wait for ever."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        seconds = int(time_s)
        micros = int((time_s - seconds) * 1e6)
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, micros))


def _kill(process: _Process) -> int:
    """Kills a process, its group and its other descendants; its exit status, which is its own where it had ended."""
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
    return process.process.wait()


def _kill_all(processes: list[_Process], owner: int) -> None:
    while processes and os.getpid() == owner:  # a fork of this process has no say
        _kill(processes.pop())


def _status(status: int) -> str:
    return f"exit status {status}" if status >= 0 else f"signal {-status}, {signal.Signals(-status).name}"
