"""The process that calls reward functions. `mrl.rewards.pool` starts it and speaks with it through a pipe.

The pool sends a WorkerConfig first, then RewardTasks, the next one when this one is answered. Calls of async functions
alone may run at the same time. The process sends what its functions are (or a ConfigError) first, then the number of
each call with its outcome, in the order that the calls end.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import faulthandler
import fcntl
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from mrl.config.rewards import Reward
from mrl.errors import ConfigError
from mrl.rewards.calls import Position, RewardCall, Sample, Scope
from mrl.rewards.functions import describe, is_async, load_reward, whole_traceback


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
class RewardTask:
    """One call, sent by itself: in one pickle, samples of a prompt would share a row that a function may change."""

    number: int  # returned with the outcome
    function: int  # index into the WorkerConfig's rewards
    samples: tuple[Sample, ...]
    position: Position


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a call."""

    values: tuple[float, ...] | None  # finite, one for each sample; None after a fault
    fault: str | None = None  # in words
    timed_out: bool = False
    traceback: str | None = None  # an exception's


class Worker:
    def __init__(self, connection: Connection, functions: list[RewardCall], timeout_s: float) -> None:
        self.connection, self.functions, self.timeout_s = connection, functions, timeout_s
        self.loop = asyncio.new_event_loop()  # one for all calls: clients that a user keeps belong to a loop
        self.waiting: list[RewardTask] = []  # one that is not async, sent when the last async one was answered
        asyncio.set_event_loop(self.loop)

    def is_async(self, task: RewardTask) -> bool:
        return is_async(self.functions[task.function].function)

    def serve(self) -> None:
        """Answers calls until the pool goes away."""
        while True:
            task: RewardTask = self.waiting.pop() if self.waiting else self.connection.recv()
            if self.is_async(task):
                self.loop.run_until_complete(self.run_async(task))
            else:
                self.connection.send((task.number, self.run(task)))

    def run(self, task: RewardTask) -> Outcome:
        reward = self.functions[task.function]
        try:
            value = reward.function(**reward.arguments(task.samples, task.position))
        except BaseException as error:
            return failed(error)
        return self.outcome(task, value)

    async def run_async(self, first: RewardTask) -> None:
        """Runs `first` and the async calls that arrive while any is running."""
        running: set[asyncio.Task[None]] = set()

        def start(task: RewardTask) -> None:
            made = self.loop.create_task(self.one(task))
            running.add(made)
            made.add_done_callback(running.discard)

        def read() -> None:
            try:
                task: RewardTask = self.connection.recv()
            except EOFError:
                os._exit(0)
            if self.is_async(task):
                start(task)
            else:
                self.waiting.append(task)

        start(first)
        self.loop.add_reader(self.connection.fileno(), read)
        try:
            while running:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.loop.remove_reader(self.connection.fileno())

    async def one(self, task: RewardTask) -> None:
        reward = self.functions[task.function]
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                value = await reward.function(**reward.arguments(task.samples, task.position))
            outcome = self.outcome(task, value)
        except BaseException as error:
            outcome = failed(error)
            if isinstance(error, TimeoutError) and limit.expired():
                outcome = Outcome(None, f"took longer than {self.timeout_s:g} s", timed_out=True)
        self.connection.send((task.number, outcome))

    def outcome(self, task: RewardTask, value: Any) -> Outcome:
        try:
            return Outcome(self.functions[task.function].values(value, len(task.samples)))
        except (ValueError, OverflowError) as error:
            return Outcome(None, str(error))


def failed(error: BaseException) -> Outcome:
    """Returns the outcome of a call that raised."""
    return Outcome(None, f"raised {describe(error)}", traceback=whole_traceback(error))


def die_with(lifeline: int) -> None:
    """Lets the kernel kill this process and its group when the other end of the pipe `lifeline` closes.

    It closes when the pool's process is gone. This works even while a function hangs in C.
    """
    if sys.platform != "linux":
        return
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def main(connection_fd: int, lifeline: int) -> None:
    """Runs the worker's whole life."""
    die_with(lifeline)
    faulthandler.enable(2)  # a crash in a C++ library says which Python lines called it
    connection = Connection(connection_fd)
    with contextlib.suppress(EOFError, OSError):
        setup: WorkerConfig = connection.recv()
        try:
            functions = [load_reward(reward, key, setup.first) for key, reward in setup.rewards]
        except ConfigError as error:
            connection.send(error)
            return
        connection.send(tuple(FunctionKind(is_async(f.function), f.scope, f.needs_tokens) for f in functions))
        Worker(connection, functions, setup.timeout_s).serve()
