"""A pool of processes that call reward functions: each call has a time limit, and a process that hangs or dies is replaced."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import multiprocessing.connection
import os
import time
import weakref
from collections.abc import Callable, Sequence

from mrl.config.rewards import FunctionReward, Reward
from mrl.errors import ConfigError
from mrl.rewards.process import Process, in_words, kill, start
from mrl.rewards.text import Prompt, Row
from mrl.rewards.worker import Answer, Call, NotReady, Ready, Setup

START_TIMEOUT_S = 300.0  # loading the user's file, which may import much
GRACE_S = 1.0  # an async function ends itself at the time limit; its process is killed this much later


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


class RewardPool:
    """Processes that call the functions of `rewards`, which come with their config keys. Raises ConfigError where a function
    cannot be loaded. `concurrency`: calls of async functions at a time in a process."""

    def __init__(
        self, rewards: Sequence[tuple[str, Reward]], *, workers: int, timeout_s: float, concurrency: int = 16
    ) -> None:
        self._setup = Setup(tuple(rewards), timeout_s)
        self._concurrency = concurrency
        self._processes: list[Process] = []
        self._finalizer = weakref.finalize(self, _kill_all, self._processes, os.getpid())
        self._asynchronous: tuple[bool, ...] = ()
        self._workers = workers
        self._next_number = 0
        self._fill()

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
        """Starts the processes that are missing and waits until they are ready; where one fails the pool is closed."""
        missing = self._workers - len(self._processes)
        if not missing:
            return
        try:
            for _ in range(missing):
                self._processes.append(start(self._setup, self._setup.timeout_s + GRACE_S))
            deadline = time.monotonic() + START_TIMEOUT_S
            for process in self._processes[-missing:]:
                self._await_ready(process, deadline)
        except BaseException:
            self.close()
            raise

    def _await_ready(self, process: Process, deadline: float) -> None:
        reply, ended = None, False
        with contextlib.suppress(EOFError, OSError):
            if ended := process.connection.poll(max(0.0, deadline - time.monotonic())):
                reply = process.connection.recv()
        if isinstance(reply, NotReady):
            raise ConfigError(reply.config_error)
        if not isinstance(reply, Ready):
            raise ConfigError(self._not_loaded(process, ended))
        self._asynchronous = reply.asynchronous

    def _not_loaded(self, process: Process, ended: bool) -> str:
        """The message for a process that went, or took too long, before it was ready."""
        status = self._drop(process)
        how = f"ended the process ({in_words(status)})" if ended else f"took longer than {START_TIMEOUT_S:g} s"
        files = [f"{k}.function: {r.function}" for k, r in self._setup.rewards if isinstance(r, FunctionReward)]
        return f"{', '.join(files) or 'rewards'}: loading {how}; import the files in a Python prompt to see why"

    def _drop(self, process: Process) -> int:
        """Kills a process; its exit status, which is its own where it had ended."""
        self._processes.remove(process)
        return kill(process)

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

    def _process_for(self, shared: bool) -> Process | None:
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
        self, run: _Run, process: Process, fault: str | None, *, timed_out: bool = False, again: bool = False
    ) -> None:
        """A process hung, or died (fault: None). Of several calls that it ran, each is tried again alone."""
        numbers = list(process.running)
        status = self._drop(process)
        if again or len(numbers) > 1:
            run.again(numbers)
        else:
            run.finish(numbers[0], Outcome(None, fault or f"ended its process ({in_words(status)})", timed_out))


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


def _kill_all(processes: list[Process], owner: int) -> None:
    while processes and os.getpid() == owner:  # a fork of this process has no say
        kill(processes.pop())
