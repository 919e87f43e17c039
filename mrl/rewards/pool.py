"""A pool of processes that call reward functions. A call has a time limit; a process that hangs or dies is replaced.

A process is started by executing Python again, not by fork: this one may hold torch's threads, a GPU and process
groups. It does not import the main module, so a script needs no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import heapq
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Collection, Sequence

import psutil

from mrl.config.rewards import FunctionReward, Reward
from mrl.errors import ConfigError
from mrl.rewards.calls import START, Position, Sample
from mrl.rewards.worker import FunctionKind, Outcome, RewardTask, WorkerConfig

PROGRAM = (
    # srun sends stop signals to every process of the job, and scoring must continue until the trainer has saved
    "import signal, sys; [signal.signal(s, signal.SIG_IGN) for s in (signal.SIGTERM, signal.SIGUSR1)]; "
    "sys.path[:] = {path!r}; from mrl.rewards.worker import main; main({connection}, {lifeline})"
)

KILL_WAIT_S = 5.0  # a process that the kernel cannot end, in a hanging file system, is left after this
START_TIMEOUT_S = 300.0  # loading the user's file, which may import much
GRACE_S = 1.0  # an async function ends itself at the time limit; its process is killed this much later
MAX_WAIT_S = 60.0  # between a call and its retry


@dataclasses.dataclass(frozen=True)
class Task:
    """One call: of the reward with index `function`, for one sample, those of a prompt, or all (`RewardPool.kinds`)."""

    function: int
    samples: tuple[Sample, ...]


@dataclasses.dataclass(frozen=True)
class Retries:
    """The number of times that a failed call of a user's function is made again: a judge may be busy."""

    count: int = 0
    wait_s: float = 1.0  # before the first retry, and twice as long before each one after it, at most MAX_WAIT_S

    def pause_s(self, number: int, index: int) -> float:
        """Returns the pause before retry `number`, from 0, of task `index`.

        It differs between tasks, so tasks that failed together are not all made again at one moment.
        """
        longest = min(self.wait_s * 2.0 ** min(number, 60), MAX_WAIT_S)
        return longest * random.Random(index).uniform(0.5, 1.0)


class RewardPool:
    """Processes that call the functions of `rewards`, given with their config keys.

    concurrency: calls of async functions at a time in a process. first: as `WorkerConfig.first`. Raises ConfigError if
    a function cannot be loaded.
    """

    def __init__(
        self,
        rewards: Sequence[tuple[str, Reward]],
        *,
        workers: int,
        timeout_s: float,
        concurrency: int = 16,
        retries: Retries | None = None,
        first: Sequence[Sample] = (),
    ) -> None:
        self._setup = WorkerConfig(tuple(rewards), timeout_s, tuple(first))
        self._concurrency = concurrency
        self._processes: list[Process] = []
        self._finalizer = weakref.finalize(self, _kill_all, self._processes, os.getpid())
        self._retries = Retries() if retries is None else retries
        self.kinds: tuple[FunctionKind, ...] = ()
        self.made_again: tuple[str, ...] = ()  # faults of the latest run that a retry followed
        self._workers = workers
        self._fill()

    def close(self) -> None:
        """Kills the processes and all that they started. The pool cannot be used afterwards."""
        self._finalizer()

    @property
    def pids(self) -> list[int]:
        return [p.process.pid for p in self._processes]

    def run(
        self,
        tasks: Sequence[Task],
        *,
        position: Position = START,
        fatal: Callable[[Task, Outcome], bool] = lambda task, outcome: False,
    ) -> list[Outcome | None]:
        """Returns the outcomes, in the order of `tasks`.

        fatal: asked of each fault, whether it ends the run. No task after it is started then, so outcomes after it may
        be None. All tasks before it have theirs, so the first fatal fault does not depend on which process was faster.

        An async call that shares a process with others when it hangs or dies is made a second time, alone.
        """
        if not self._finalizer.alive:
            raise RuntimeError("the reward pool is closed")
        users = [isinstance(reward, FunctionReward) for _, reward in self._setup.rewards]
        run = _PoolRun(tasks, position, fatal, [self._retries if own else Retries() for own in users])
        try:
            while run.unfinished:
                self._fill()
                self._dispatch(run)
                self._collect(run)
        finally:
            self.made_again = tuple(run.made_again)
            for process in [p for p in self._processes if p.running]:
                self._drop(process)
        return run.outcomes

    # ----------------------------------------------------------------------------------------------- the processes

    def _fill(self) -> None:
        """Starts the missing processes and waits until they are ready. If one fails, the pool is closed."""
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
        if isinstance(reply, ConfigError):
            raise reply
        if reply is None:
            status = self._drop(process)
            how = f"ended the process ({in_words(status)})" if ended else f"took longer than {START_TIMEOUT_S:g} s"
            files = [f"{k}.function: {r.function}" for k, r in self._setup.rewards if isinstance(r, FunctionReward)]
            fix = "import the files in a Python prompt to see why"
            raise ConfigError(", ".join(files) or "rewards", why=f"loading {how}", fix=fix)
        self.kinds = reply

    def _drop(self, process: Process) -> int:
        """Kills a process. Returns its exit status: its own if it had ended."""
        self._processes.remove(process)
        return kill(process)

    # ---------------------------------------------------------------------------------------------------- the calls

    def _dispatch(self, run: _PoolRun) -> None:
        """Gives tasks to processes until each has as many as it can take."""
        while (index := run.peek()) is not None:
            task = run.tasks[index]
            waits = self.kinds[task.function].asynchronous
            shared = waits and index not in run.alone
            process = self._process_for(shared)
            if process is None:
                return
            process.running[run.take()] = time.monotonic() + self._setup.timeout_s + (GRACE_S if waits else 0.0)
            process.exclusive = not shared
            try:
                process.connection.send(RewardTask(index, task.function, task.samples, run.position))
            except OSError:  # it died since its last call, or does not read
                if index in run.alone:
                    self._fail(run, process, "does not take calls")
                else:
                    run.again(process.running)
                    self._drop(process)
                return

    def _process_for(self, shared: bool) -> Process | None:
        """Returns the process with the fewest calls that can take one more."""
        limit = self._concurrency if shared else 1
        free = [p for p in self._processes if len(p.running) < limit and not (p.running and p.exclusive)]
        return min(free, key=lambda p: len(p.running), default=None)

    def _collect(self, run: _PoolRun) -> None:
        """Waits for answers, deaths or the next deadline, and takes what there is."""
        busy = {p.connection: p for p in self._processes if p.running}
        if not busy:
            run.wait_for_retry()
            return
        soonest = min((*run.retry_times(), *(deadline for p in busy.values() for deadline in p.running.values())))
        ready = multiprocessing.connection.wait(list(busy), max(0.0, soonest - time.monotonic()))
        for connection, process in busy.items():
            if connection in ready:
                try:
                    index, outcome = connection.recv()
                except (EOFError, OSError):
                    self._fail(run, process, None)
                else:
                    del process.running[index]
                    run.finish(index, outcome)
        now = time.monotonic()
        for connection, process in busy.items():
            if connection not in ready and min(process.running.values()) <= now:
                self._fail(run, process, f"took longer than {self._setup.timeout_s:g} s", timed_out=True)

    def _fail(self, run: _PoolRun, process: Process, fault: str | None, *, timed_out: bool = False) -> None:
        """Handles a process that hung, or died (fault: None). If several calls were running, each is made again
        alone."""
        status = self._drop(process)
        if len(process.running) > 1:
            run.again(process.running)
            return
        (index,) = process.running
        run.finish(index, Outcome(None, fault or f"ended its process ({in_words(status)})", timed_out))


class _PoolRun:
    """Tracks the tasks of one `RewardPool.run`: waiting, to run alone, and their outcomes."""

    def __init__(
        self,
        tasks: Sequence[Task],
        position: Position,
        fatal: Callable[[Task, Outcome], bool],
        retries: Sequence[Retries],
    ) -> None:
        self.tasks, self.position, self.fatal = tasks, position, fatal
        self.outcomes: list[Outcome | None] = [None] * len(tasks)
        self.alone: set[int] = set()
        self._retries = retries  # for each function
        self._retried: dict[int, int] = {}  # task -> how often
        self._later: list[tuple[float, int]] = []  # a heap: (when, task)
        self.made_again: list[str] = []  # the fault of each call that is, or will be
        self._ready: collections.deque[int] = collections.deque()  # tasks to make again at once
        self._next = 0
        self._end = self._missing = len(tasks)  # tasks from _end on are not wanted; _missing counts those before

    @property
    def unfinished(self) -> bool:
        return self._missing > 0

    def peek(self) -> int | None:
        """Returns the index of the task to start next."""
        while self._later and self._later[0][0] <= time.monotonic():
            self._ready.append(heapq.heappop(self._later)[1])
        while self._ready and self._ready[0] >= self._end:
            self._ready.popleft()
        if self._ready:
            return self._ready[0]
        return self._next if self._next < self._end else None

    def take(self) -> int:
        if self._ready:
            return self._ready.popleft()
        self._next += 1
        return self._next - 1

    def retry_times(self) -> list[float]:
        """Returns when the next retry is due, if there is one."""
        return [when for when, _ in self._later[:1]]

    def wait_for_retry(self) -> None:
        """Waits until the next retry is due, while nothing else is running."""
        for when in self.retry_times():
            time.sleep(max(0.0, when - time.monotonic()))

    def again(self, indices: Collection[int]) -> None:
        """Lets tasks be made again, each without others in its process."""
        self.alone.update(indices)
        self._ready.extend(sorted(indices))

    def finish(self, index: int, outcome: Outcome) -> None:
        if outcome.fault is not None and index < self._end and self._retry(index):
            self.made_again.append(outcome.fault)
            return
        self.outcomes[index] = outcome
        self._missing -= index < self._end
        if outcome.fault is not None and index < self._end and self.fatal(self.tasks[index], outcome):
            self._end = index
            self._missing = sum(o is None for o in self.outcomes[:index])

    def _retry(self, index: int) -> bool:
        """Returns whether a failed task is made again, later."""
        retries, made = self._retries[self.tasks[index].function], self._retried.get(index, 0)
        if made >= retries.count:
            return False
        self._retried[index] = made + 1
        heapq.heappush(self._later, (time.monotonic() + retries.pause_s(made, index), index))
        return True


def _kill_all(processes: list[Process], owner: int) -> None:
    while processes and os.getpid() == owner:  # a fork of this process has no say
        kill(processes.pop())


# ---------------------------------------------------------------------------------------------------------- one process


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
    program = PROGRAM.format(path=sys.path, connection=fds[0], lifeline=fds[1])
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
    """Waits, at most KILL_WAIT_S, until killed processes are gone. Not being our children, zombies count as gone."""
    deadline = time.monotonic() + KILL_WAIT_S
    while any(map(_is_running, killed)) and time.monotonic() < deadline:
        time.sleep(0.01)


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def in_words(status: int) -> str:
    return f"exit status {status}" if status >= 0 else f"signal {-status}, {signal.Signals(-status).name}"
