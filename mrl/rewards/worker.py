"""The process that calls reward functions. `mrl.rewards.pool` starts it and speaks with it through a pipe.

The pool sends a WorkerConfig first, then RewardTasks. They are made in their order, each after the one before. Calls of
async functions alone may run at the same time. The process sends WorkerReady or WorkerFailed first, then Answers in the
order that the calls end. Answers of consecutive calls wait for each other up to FLUSH_S. The number of the running call
is in shared memory: it tells the pool which call hung or crashed.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import faulthandler
import fcntl
import mmap
import os
import pickle
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from mrl.config.rewards import Reward
from mrl.errors import ConfigError
from mrl.rewards.calls import Position, RewardCall, Sample, Scope
from mrl.rewards.functions import describe, is_async, load_reward, whole_traceback

NUMBER_BYTES = 8


@dataclasses.dataclass(frozen=True)
class WorkerConfig:
    """The settings that a process is made with."""

    rewards: tuple[tuple[str, Reward], ...]  # with the config key of each
    timeout_s: float
    first: Sequence[Sample] = ()
    """Samples whose rows must have what the functions name; without, rows are seen when they are scored."""


@dataclasses.dataclass(frozen=True)
class FunctionKind:
    """The signature of a reward function, as far as the pool needs it."""

    asynchronous: bool
    scope: Scope
    needs_tokens: bool


@dataclasses.dataclass(frozen=True)
class WorkerReady:
    kinds: tuple[FunctionKind, ...]


@dataclasses.dataclass(frozen=True)
class WorkerFailed:
    error: ConfigError


@dataclasses.dataclass(frozen=True)
class RewardTask:
    number: int  # returned with the answer
    function: int  # index into the WorkerConfig's rewards
    samples: tuple[Sample, ...]


@dataclasses.dataclass(frozen=True)
class RewardTasks:
    """One message: a round trip for each call took longer than most functions do."""

    calls: tuple[bytes, ...]
    """Each call is pickled by itself.

    In one pickle, samples of a prompt would share one row. A function that changes its row would then change the next
    call's.
    """
    position: Position


@dataclasses.dataclass(frozen=True)
class TaskAnswer:
    """The answer of a worker to a task."""

    number: int
    values: tuple[float, ...] | None  # finite, one for each sample; None after a fault
    fault: str | None = None  # in words
    timed_out: bool = False  # whether the fault is that
    traceback: str | None = None
    seconds: float = 0.0


Answers = tuple[TaskAnswer, ...]
FLUSH_S = 0.005
MAX_LOGGED = 20  # tracebacks that a process writes to its log


class Worker:
    def __init__(self, connection: Connection, begun: mmap.mmap, functions: list[RewardCall], timeout_s: float) -> None:
        self.connection = connection
        self.begun = begun
        self.functions = functions
        self.timeout_s = timeout_s
        self.loop = asyncio.new_event_loop()  # one for all calls: clients that a user keeps belong to a loop
        self.waiting: collections.deque[tuple[RewardTask, Position]] = collections.deque()  # received and not begun
        self.logged = 0
        asyncio.set_event_loop(self.loop)

    def serve(self) -> None:
        """Answers calls until the pool goes away."""
        answers: list[TaskAnswer] = []
        flushed_s = 0.0
        while True:
            if not self.waiting:
                self.receive()
                flushed_s = time.perf_counter()
            call, position = self.waiting.popleft()
            if is_async(self.functions[call.function].function):
                self.loop.run_until_complete(self.run_async(call, position))
                continue
            self.begun[:NUMBER_BYTES] = call.number.to_bytes(NUMBER_BYTES, "little")
            answers.append(self.run(call, position))
            if not self.waiting or time.perf_counter() - flushed_s >= FLUSH_S:
                self.connection.send(tuple(answers))
                answers.clear()
                flushed_s = time.perf_counter()

    def receive(self) -> None:
        received: RewardTasks = self.connection.recv()
        self.waiting.extend((pickle.loads(call), received.position) for call in received.calls)

    def run(self, call: RewardTask, position: Position) -> TaskAnswer:
        reward, began_s = self.functions[call.function], time.perf_counter()
        try:
            by_place, by_name = reward.arguments(call.samples, position)
        except ValueError as error:  # a field of the row is missing, or is not what the form has
            return TaskAnswer(call.number, None, str(error))
        try:
            value = reward.function(*by_place, **by_name)
        except BaseException as error:
            return self.failed(call, error)
        return self.answer(call, value, time.perf_counter() - began_s)

    async def run_async(self, first: RewardTask, position: Position) -> None:
        """Runs `first` and the async calls that arrive while any is running."""
        tasks: set[asyncio.Task[None]] = set()

        def start(call: RewardTask, position: Position) -> None:
            task = self.loop.create_task(self.one(call, position))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        def start_waiting() -> None:
            while self.waiting and is_async(self.functions[self.waiting[0][0].function].function):
                start(*self.waiting.popleft())

        def read() -> None:
            try:
                self.receive()
            except EOFError:
                os._exit(0)
            start_waiting()

        start(first, position)
        start_waiting()
        self.loop.add_reader(self.connection.fileno(), read)
        try:
            while tasks:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.loop.remove_reader(self.connection.fileno())

    async def one(self, call: RewardTask, position: Position) -> None:
        reward = self.functions[call.function]
        try:
            by_place, by_name = reward.arguments(call.samples, position)
        except ValueError as error:  # a field of the row is missing, or is not what the form has
            self.connection.send((TaskAnswer(call.number, None, str(error)),))
            return
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                value = await reward.function(*by_place, **by_name)
            answer = self.answer(call, value)
        except BaseException as error:
            if isinstance(error, TimeoutError) and limit.expired():
                answer = TaskAnswer(call.number, None, f"took longer than {self.timeout_s:g} s", True)
            else:
                answer = self.failed(call, error)
        self.connection.send((answer,))

    def answer(self, call: RewardTask, value: Any, seconds: float = 0.0) -> TaskAnswer:
        try:
            values = self.functions[call.function].values(value, len(call.samples))
            return TaskAnswer(call.number, values, seconds=seconds)
        except (ValueError, OverflowError) as error:
            return TaskAnswer(call.number, None, str(error))
        except Exception as error:  # an object whose repr or float raises
            what = f"returned a {type(value).__name__} that is no number: {describe(error)}"
            return TaskAnswer(call.number, None, what, traceback=whole_traceback(error))

    def failed(self, call: RewardTask, error: BaseException) -> TaskAnswer:
        """Returns the answer to a call that raised. Its traceback goes to the log (standard error) too."""
        what, where = describe(error), whole_traceback(error)
        self.logged += 1
        if self.logged <= MAX_LOGGED:
            sample = call.samples[0]
            print(f"reward of row {sample.where} raised {what}\n{where}completion: {sample.completion[:2000]!r}",
                  file=sys.stderr, flush=True)  # fmt: skip
        return TaskAnswer(call.number, None, f"raised {what}", traceback=where)


def die_with(lifeline: int) -> None:
    """Lets the kernel kill this process and its group when the other end of the pipe `lifeline` closes.

    It closes when the pool's process is gone. This works even while a function hangs in C.
    """
    if sys.platform != "linux":
        return
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def main(connection_fd: int, lifeline: int, begun_fd: int) -> None:
    """Runs the worker's whole life."""
    die_with(lifeline)
    faulthandler.enable(2)  # a crash in a C++ library says which Python lines called it
    connection = Connection(connection_fd)
    with contextlib.suppress(EOFError, OSError):
        setup: WorkerConfig = connection.recv()
        try:
            functions = [load_reward(reward, key, setup.first) for key, reward in setup.rewards]
        except ConfigError as error:
            connection.send(WorkerFailed(error))
            return
        connection.send(
            WorkerReady(tuple(FunctionKind(is_async(f.function), f.scope, f.needs_tokens) for f in functions))
        )
        Worker(connection, mmap.mmap(begun_fd, NUMBER_BYTES), functions, setup.timeout_s).serve()
