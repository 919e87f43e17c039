"""Runs conversations with a user's environment: one object per trajectory, called on the main process only.

    class Env:
        def reset(self, row): ...      # None, or a prompt in place of the row's: text or messages
        def step(self, text): ...      # (observation, reward, done)

Either method may be async. Calls are made at the same time, and while the caller does something else. A plain class is
called in threads, each object always in the same one. An async class is called on one event loop.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import inspect
import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from mrl.data.files import BadRow
from mrl.data.formats import check_messages
from mrl.data.prompts import Prompt
from mrl.errors import ConfigError, RewardError
from mrl.rewards.calls import as_float, with_type
from mrl.rewards.functions import describe, is_async, load_named

THREADS = 256
KEY = "rollout.environment"

Content = str | list[dict[str, Any]]
"""A text, which becomes a user turn, or messages."""


@dataclasses.dataclass(frozen=True)
class EnvironmentStep:
    """The answer of an environment to a turn."""

    observation: Content | None  # None where it has nothing more to say
    reward: float
    done: bool


def load_environment(spec: str) -> Callable[[], Any]:
    """Returns the class that `path.py:Class` names. Raises ConfigError if it cannot be used."""
    environment: Any = load_named(spec, KEY, kind="class")
    try:
        inspect.signature(environment).bind()
        inspect.signature(environment.reset).bind(None, {})
        inspect.signature(environment.step).bind(None, "text")
    except (AttributeError, TypeError) as error:
        fix = "write __init__(self), reset(self, row) and step(self, text)"
        raise ConfigError(KEY, why=f"{spec}: {error}", fix=fix) from None
    return environment


@dataclasses.dataclass(eq=False)
class _EnvironmentCall:
    """A call of one conversation's object."""

    number: int  # the conversation's
    method: Literal["reset", "step"]
    argument: Any
    started: float | None = None  # by time.monotonic; None while the call waits
    ended: float | None = None  # by time.monotonic
    value: Any = None
    fault: str | None = None


class Environments:
    """Holds the objects of the conversations of one rollout.

    timeout_s: of one call; the first reset makes the object too. Raises RewardError for an exception, a timeout, or an
    answer of another form. It names `name`, the row and what to do.
    """

    def __init__(self, environment: Callable[[], Any], name: str, *, timeout_s: float) -> None:
        self._class, self._name, self._timeout_s = environment, name, timeout_s
        self._objects: list[Any] = []
        self._prompts: list[Prompt] = []
        self._changed = threading.Condition()
        self._under_way: dict[int, list[_EnvironmentCall]] = {}  # the calls of each part of the conversations
        self._asynchronous = any(is_async(getattr(environment, method)) for method in ("reset", "step"))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads: list[queue.SimpleQueue[_EnvironmentCall | None]] = []

    def reset(self, prompts: Sequence[Prompt]) -> list[Content | None]:
        """Begins conversations 0, 1, ..., each with a row. Returns the prompt that replaces each one's own, or None."""
        self._prompts, self._objects = list(prompts), [None] * len(prompts)
        self._start()
        calls = [_EnvironmentCall(i, "reset", copy.deepcopy(prompt.row)) for i, prompt in enumerate(prompts)]
        self._under_way = {}
        self._begin(0, calls)
        return [self._checked(call, self._prompt_of) for call in self._ended(wait=True)[0]]

    def begin_steps(self, part: int, turns: Sequence[tuple[int, str]]) -> None:
        """Gives the policy's turns to the conversations with these numbers, a part of all; see `answers`."""
        self._begin(part, [_EnvironmentCall(number, "step", text) for number, text in turns])

    def answers(self, *, wait: bool) -> dict[int, list[EnvironmentStep]]:
        """Returns the answers, once, of each part whose conversations have all answered, in the order of its turns.

        wait: until there is one. Otherwise there may be none.
        """
        return {
            part: [self._checked(call, self._step_of) for call in calls]
            for part, calls in self._ended(wait=wait).items()
        }

    def close(self) -> None:
        """Forgets the objects and ends the threads; one that hangs in a call ends with the process."""
        self._objects = []
        for calls in self._threads:
            calls.put(None)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._threads, self._loop = [], None

    # ------------------------------------------------------------------------------------------------------- calls

    def _start(self) -> None:
        """Starts daemon threads: a call that hangs does not keep the process from ending."""
        if self._asynchronous and self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_serve_loop, args=(self._loop,), name="mrl-environments", daemon=True).start()
        while not self._asynchronous and len(self._threads) < min(THREADS, len(self._objects)):
            self._threads.append(queue.SimpleQueue())
            threading.Thread(target=self._serve, args=(self._threads[-1],), name="mrl-environment", daemon=True).start()

    def _begin(self, part: int, calls: list[_EnvironmentCall]) -> None:
        assert part not in self._under_way, f"part {part} has not answered yet"
        self._under_way[part] = calls
        for call in calls:
            if self._loop is not None:
                asyncio.run_coroutine_threadsafe(self._make_async(call), self._loop)
            else:
                self._threads[call.number % len(self._threads)].put(call)

    def _ended(self, *, wait: bool) -> dict[int, list[_EnvironmentCall]]:
        """Takes the parts that have ended from those under way. Raises the first fault, by conversation."""
        with self._changed:
            while True:
                self._check_time()
                ended = {p: calls for p, calls in self._under_way.items() if all(c.ended is not None for c in calls)}
                if ended or not wait:
                    break
                assert self._under_way, "there is nothing to wait for"
                self._changed.wait(self._until_next_limit())
        for part, calls in ended.items():
            del self._under_way[part]
            for call in calls:
                if call.fault is not None:
                    raise self._error(call, "correct the environment, or let it end this conversation with reward 0")
        return ended

    def _check_time(self) -> None:
        """Raises RewardError for a call over its time, also if it was over while nobody waited for it."""
        now = time.monotonic()
        for call in (c for calls in self._under_way.values() for c in calls):
            until = now if call.ended is None else call.ended
            if call.started is not None and until - call.started > self._timeout_s:
                call.fault = f"took more than {self._timeout_s:g} s"
                raise self._error(call, f"make it faster, or raise {KEY}_timeout_s")

    def _until_next_limit(self) -> float:
        """Returns seconds; at most one, because a call that has not begun may begin meanwhile."""
        running = [c for calls in self._under_way.values() for c in calls if c.ended is None]
        first = min((c.started for c in running if c.started is not None), default=time.monotonic())
        return min(1.0, first + self._timeout_s - time.monotonic() + 0.01)

    def _serve(self, calls: queue.SimpleQueue[_EnvironmentCall | None]) -> None:
        while (call := calls.get()) is not None:
            call.started = time.monotonic()
            try:
                call.value = self._method(call)(call.argument)
            except BaseException as error:
                call.fault = f"raised {describe(error)}"
            self._end(call)

    async def _make_async(self, call: _EnvironmentCall) -> None:
        call.started = time.monotonic()
        try:
            value = self._method(call)(call.argument)
            call.value = await value if inspect.isawaitable(value) else value
        except BaseException as error:
            call.fault = f"raised {describe(error)}"
        self._end(call)

    def _method(self, call: _EnvironmentCall) -> Callable[[Any], Any]:
        if call.method == "reset":
            self._objects[call.number] = self._class()
        return getattr(self._objects[call.number], call.method)

    def _end(self, call: _EnvironmentCall) -> None:
        with self._changed:
            call.ended = time.monotonic()
            self._changed.notify()

    # ----------------------------------------------------------------------------------------------------- answers

    def _error(self, call: _EnvironmentCall, advice: str) -> RewardError:
        where = self._prompts[call.number].where
        return RewardError(KEY, why=f"{self._name}: row {where}: {call.method} {call.fault}", fix=advice)

    def _checked(self, call: _EnvironmentCall, read: Callable[[Any], Any]) -> Any:
        try:
            return read(call.value)
        except (BadRow, ValueError, OverflowError) as error:
            call.fault = f"returned what cannot be used: {error}" if isinstance(error, BadRow) else str(error)
            raise self._error(call, "correct the environment, or let it end this conversation with reward 0") from None

    def _prompt_of(self, value: Any) -> Content | None:
        return None if value is None else _content_of(value, "the prompt")

    def _step_of(self, value: Any) -> EnvironmentStep:
        if not isinstance(value, tuple | list) or len(value) != 3:
            raise ValueError(f"returned {with_type(value)}, which is not (observation, reward, done)")
        observation, reward, done = value
        reward = as_float(reward, " as the reward")
        if hasattr(done, "item"):  # NumPy's
            done = done.item()
        if not isinstance(done, bool):
            raise ValueError(f"returned {with_type(done)} as done, which is not True or False")
        if observation is None and not done:
            raise ValueError("returned no observation, and done is False")
        return EnvironmentStep(
            None if observation is None else _content_of(observation, "the observation"), reward, done
        )


def _serve_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()


def _content_of(value: Any, what: str) -> Content:
    """Returns a text as it is, and one or more messages as a list of plain data of their own."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict | list):
        raise ValueError(f"returned {with_type(value)} as {what}; give text, a message or a list of messages")
    try:
        messages = json.loads(json.dumps(value if isinstance(value, list) else [value]))
    except (TypeError, ValueError) as error:
        raise ValueError(f"returned {what} with something that is no plain data ({error})") from None
    return check_messages(messages, what)
