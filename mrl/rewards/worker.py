"""The process that calls reward functions. `mrl.rewards.pool` starts it and speaks with it through a pipe.

From the pool: first a Setup; then a Call at a time, more at a time only while all that are running are async.
To the pool: first Ready or NotReady; then an Answer per call, in the order they end.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import fcntl
import math
import numbers
import os
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from mrl.config.rewards import Reward
from mrl.errors import ConfigError
from mrl.rewards.functions import RewardFunction, describe, is_async, load_reward
from mrl.rewards.text import Prompt, Row


@dataclasses.dataclass(frozen=True)
class Setup:
    """rewards: with the config key of each."""

    rewards: tuple[tuple[str, Reward], ...]
    timeout_s: float


@dataclasses.dataclass(frozen=True)
class Ready:
    asynchronous: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class NotReady:
    config_error: str


@dataclasses.dataclass(frozen=True)
class Call:
    """function: index into the Setup's rewards. number: returned with the answer."""

    number: int
    function: int
    prompt: Prompt
    completion: str
    row: Row


@dataclasses.dataclass(frozen=True)
class Answer:
    """Either a finite value or a fault in words; timed_out where the fault is that."""

    number: int
    value: float | None
    fault: str | None = None
    timed_out: bool = False


def as_float(value: Any, what: str = "") -> float:
    """A reward as a float. bool, int, float, NumPy's and a tensor with one element are numbers; ValueError names others.

    what: said after the value, as " as the reward".
    """
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real):
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        raise ValueError(f"returned {shown} ({type(value).__name__}){what}, which is no number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"returned {number}{what}, which is not finite")
    return number


def _answer(number: int, value: Any) -> Answer:
    try:
        return Answer(number, as_float(value))
    except (ValueError, OverflowError) as error:
        return Answer(number, None, str(error))
    except Exception as error:  # an object whose repr or float raises
        return Answer(number, None, f"returned a {type(value).__name__} that is no number: {describe(error)}")


class Worker:
    def __init__(self, connection: Connection, functions: list[RewardFunction], timeout_s: float):
        self.connection = connection
        self.functions = functions
        self.timeout_s = timeout_s
        self.loop = asyncio.new_event_loop()  # one for all calls: clients that a user keeps belong to a loop
        self.waiting: collections.deque[Call] = collections.deque()  # read while async calls were running
        asyncio.set_event_loop(self.loop)

    def serve(self) -> None:
        """Answers calls until the pool goes away."""
        while True:
            call = self.waiting.popleft() if self.waiting else self.connection.recv()
            function = self.functions[call.function]
            if is_async(function):
                self.loop.run_until_complete(self.run_async(call))
            else:
                self.connection.send(self.run(function, call))

    def run(self, function: RewardFunction, call: Call) -> Answer:
        try:
            value = function(call.prompt, call.completion, call.row)
        except BaseException as error:
            return Answer(call.number, None, f"raised {describe(error)}")
        return _answer(call.number, value)

    async def run_async(self, first: Call) -> None:
        """Runs `first` and the async calls that arrive while any is running."""
        tasks: set[asyncio.Task[None]] = set()

        def start(call: Call) -> None:
            task = self.loop.create_task(self.one(call))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        def read() -> None:
            try:
                call = self.connection.recv()
            except EOFError:
                os._exit(0)
            if is_async(self.functions[call.function]):
                start(call)
            else:
                self.waiting.append(call)

        start(first)
        self.loop.add_reader(self.connection.fileno(), read)
        try:
            while tasks:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.loop.remove_reader(self.connection.fileno())

    async def one(self, call: Call) -> None:
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                value = await self.functions[call.function](call.prompt, call.completion, call.row)
            answer = _answer(call.number, value)
        except BaseException as error:
            timed_out = isinstance(error, TimeoutError) and limit.expired()
            fault = f"took longer than {self.timeout_s:g} s" if timed_out else f"raised {describe(error)}"
            answer = Answer(call.number, None, fault, timed_out)
        self.connection.send(answer)


def die_with(lifeline: int) -> None:
    """Lets the kernel kill this process and its group when the other end of the pipe `lifeline` closes, that is when the
    pool's process is gone, even while a function hangs in C."""
    if sys.platform != "linux":
        return
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def main(connection_fd: int, lifeline: int) -> None:
    """The worker's whole life."""
    die_with(lifeline)
    connection = Connection(connection_fd)
    with contextlib.suppress(EOFError, OSError):
        setup: Setup = connection.recv()
        try:
            functions = [load_reward(reward, key) for key, reward in setup.rewards]
        except ConfigError as error:
            connection.send(NotReady(str(error)))
            return
        connection.send(Ready(tuple(is_async(f) for f in functions)))
        Worker(connection, functions, setup.timeout_s).serve()
