"""The desk of the server: what clients ask for goes on queues, what the ranks have made of it is fetched.

Requests arrive on the thread of the HTTP server and get a promise at once. The main thread, which alone computes, takes
turns: one operation of a model, or all samples that wait for one snapshot. Models come by turns, and each model's
operations in the order of their numbers, whatever order they arrived in.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import itertools
import json
import secrets
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal

from mrl.errors import UserError

Category = Literal["user", "server", "unknown"]
JSON, PROTOBUF = "application/json", "application/x-protobuf"

KEPT_S = 900.0
"""Seconds that a result is kept: a client whose connection broke asks again within 300 s."""

FETCHED_S = 120.0
"""And one that was fetched, where all that are kept have more than MOST_BYTES: an answer that is lost on its way is
asked for again within 45 s."""

MOST_BYTES = 2**28
"""Bytes of results that are kept for KEPT_S, whether they were fetched or not: log-probs of long data are megabytes."""

MOST_UNFETCHED = 2**30
"""Bytes of results that nobody has fetched, above which nothing more is taken until some are, or are out of date."""

MOST_WAITING_BYTES = 2**31
"""Bytes of the calls of models that wait at once."""

UNFETCHED_S = 400.0
"""Seconds after which a result that nobody has fetched goes too, where there are too many."""

LATE_S = 400.0
"""Seconds that calls wait for one with a lower number: a client tries for 300 s to send it."""

GATHER_S, GATHER_MOST_S = 0.01, 0.25
"""Seconds that a turn waits for the next of those that come one soon after another, and for all of them: what is done
together costs little more than what is done alone. Clients that waited for one turn come back together."""

OF = "@"
"""Before the name of the model in a promise's id: where the promise is not known any more, the client is told what
became of the model. Of an answer of 410 it shows no more than `Promise expired/broken`."""

LOOK_S = 10.0
"""How often what is out of date is looked for: looking costs as much as all that is kept."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What a promise came to."""

    body: bytes
    media_type: str = JSON


@dataclasses.dataclass(eq=False)
class Promise:
    """A result that is on its way."""

    id: str
    model: str | None = None
    result: Result | None = None
    asked_at: float = 0.0
    done_at: float = 0.0
    fetched_at: float | None = None
    unwanted: bool = False  # nobody will ask for it
    told: list[Callable[[], None]] = dataclasses.field(default_factory=list)  # called when it is done


@dataclasses.dataclass(eq=False)
class Waiting:
    """An operation on a queue."""

    operation: Any
    promise: Promise
    size: int = 0  # bytes that it holds


@dataclasses.dataclass(frozen=True)
class Turn:
    """What the ranks do next."""

    queue: Hashable
    waiting: Sequence[Waiting]


class Busy(Exception):
    """There is no room on a queue; ask again later."""


class Gone(Exception):
    """A promise that is not known: its result was kept for KEPT_S seconds, or the server has been started anew."""


class _Numbered:
    """The operations of a model, which are taken in the order of their numbers."""

    def __init__(self, first: int) -> None:
        self.next = first
        self.waiting: dict[int, Waiting] = {}
        self.refused: set[int] = set()  # numbers that are not waited for

    def ready(self) -> bool:
        return self.next in self.waiting

    def take(self) -> list[Waiting]:
        self.next += 1
        taken = [self.waiting.pop(self.next - 1)]
        self.pass_refused()
        return taken

    def leave(self) -> list[Waiting]:
        """Takes all that waits off the queue, whose next operation comes after it."""
        left = list(self.waiting.values())
        self.next = max(self.waiting) + 1
        self.waiting.clear()
        self.pass_refused()
        return left

    def pass_refused(self) -> None:
        while self.next in self.refused:
            self.refused.remove(self.next)
            self.next += 1


class _Together:
    """Operations of which all that wait are done at once."""

    def __init__(self) -> None:
        self.waiting: list[Waiting] = []
        self.more = False  # whether others are likely to come soon

    def ready(self) -> bool:
        return bool(self.waiting)

    def take(self) -> list[Waiting]:
        taken, self.waiting = self.waiting, []
        return taken


class Desk:
    """Queues and promises of one server. Every method may be called on any thread."""

    def __init__(self, *, most_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most_waiting, self.clock = most_waiting, clock
        self._lock = threading.Condition()
        self._queues: dict[Hashable, _Numbered | _Together] = {}
        self._turns: collections.deque[Hashable] = collections.deque()  # every queue, the one that waits longest first
        self._promises: dict[str, Promise] = {}
        self._by_key: dict[Hashable, Promise] = {}
        self._name, self._ids = secrets.token_hex(4), itertools.count(1)  # no id of an earlier start comes again
        self._closed: str | None = None
        self._ended = False
        self._unfetched = 0  # bytes
        self._together: set[str] = set()  # promises of what is done together that are not kept yet, drawn or waiting
        self._looked = clock()

    # -- of clients --------------------------------------------------------------------------------------------------

    def open(self, queue: Hashable, *, first: int) -> None:
        """Makes the queue of a model, whose first operation has the number `first`."""
        with self._lock:
            self._add(queue, _Numbered(first))

    def _add(self, queue: Hashable, made: _Numbered | _Together) -> None:
        self._queues[queue] = made
        self._turns.append(queue)

    def has(self, queue: Hashable) -> bool:
        """Returns whether a model has a queue."""
        with self._lock:
            return queue in self._queues

    def waits(self, queue: Hashable) -> bool:
        """Returns whether a queue has something to do."""
        with self._lock:
            return queue in self._queues and self._queues[queue].ready()

    def drop(self, queue: Hashable, why: UserError) -> None:
        """Ends a queue; what waits there fails."""
        with self._lock:
            made = self._queues.pop(queue, None)
            if made is None:
                return
            self._turns.remove(queue)
            left = list(made.waiting.values() if isinstance(made, _Numbered) else made.waiting)
        for waiting in left:
            self.fail(waiting.promise, "user", str(why))

    def check_open(self) -> None:
        """Raises Busy where nothing more is taken."""
        with self._lock:
            if self._closed is not None:
                raise Busy

    def check_room(self, count: int) -> None:
        """Raises Busy where there is no room for so many operations that are done together, and UserError where there
        never is."""
        if count > self.most_waiting:
            fix = f"send at most {self.most_waiting} at a time, or raise serve.max_waiting"
            raise UserError("prompt", why=f"is {count} prompts", fix=fix)
        with self._lock:
            self._check_room(_Together(), count)

    def known(self, queue: Hashable, number: Hashable) -> Promise | None:
        """Returns what was promised for a number or another key, None where nothing was: what was right then may be
        refused now."""
        with self._lock:
            return self._by_key.get((queue, number))

    def refuse(self, queue: Hashable, number: int) -> None:
        """Says that the operation with this number will not come: those after it do not wait for it."""
        with self._lock:
            made = self._queues.get(queue)
            if isinstance(made, _Numbered) and number >= made.next and number not in made.waiting:
                made.refused.add(number)
                made.pass_refused()
                self._lock.notify_all()

    def give_up(self) -> dict[Hashable, int]:
        """Fails what has waited for LATE_S seconds for an operation with a lower number, and goes on after it. Returns
        the numbers that have not come, by the queues that waited for them."""
        left: list[tuple[int, Waiting]] = []
        lacked: dict[Hashable, int] = {}
        with self._lock:
            before = self.clock() - LATE_S
            for queue, made in self._queues.items():
                if not isinstance(made, _Numbered) or made.ready() or not made.waiting:
                    continue
                if min(waiting.promise.asked_at for waiting in made.waiting.values()) < before:
                    lacked[queue] = made.next
                    left += [(lacked[queue], waiting) for waiting in made.leave()]
        for lacking, waiting in left:
            why, fix = (
                "has not come, and later ones waited for it",
                "look at the client's first error, and send them again",
            )
            self.fail(waiting.promise, "user", str(UserError("seq_id", lacking, why, fix)))
        return lacked

    def put(
        self, queue: Hashable, number: int, operation: Any, *, model: str | None = None, size: int = 0
    ) -> Promise:  # fmt: skip
        """Puts an operation of a model on its queue. The same number gets the first promise again. size: bytes of it.

        Raises KeyError where there is no such queue, and Busy. There is always room for the one that a model waits for:
        others' operations keep no model from going on, nor do its own that came too early.
        """
        key = (queue, number)
        with self._lock:
            if key in self._by_key:
                return self._by_key[key]
            made = self._queues[queue]
            assert isinstance(made, _Numbered)
            if number < made.next:  # it was done, and its result is no longer kept: it is not to be done twice
                return Promise(f"gone-{number}{OF}{model}", model)
            self._check_room(made, size=size, next=number == made.next)
            promise = self._promise(key, model)
            made.refused.discard(number)
            made.waiting[number] = Waiting(operation, promise, size)
            self._lock.notify_all()
            return promise

    def put_together(self, queue: Hashable, key: Hashable, operation: Any) -> Promise:
        """Puts an operation on a queue of those that are done together. The same key gets the first promise again.

        Raises Busy.
        """
        with self._lock:
            if key in self._by_key:
                return self._by_key[key]
            if queue not in self._queues:
                self._add(queue, _Together())
            made = self._queues[queue]
            assert isinstance(made, _Together)
            self._check_room(made)
            promise = self._promise(key, None)
            self._together.add(promise.id)
            made.waiting.append(Waiting(operation, promise))
            made.more = True
            self._lock.notify_all()
            return promise

    def _check_room(
        self, made: _Numbered | _Together, count: int = 1, *, size: int = 0, next: bool = False
    ) -> None:  # fmt: skip
        if self._unfetched > MOST_UNFETCHED:
            self._forget()
        if self._closed is not None or self._unfetched > MOST_UNFETCHED:
            raise Busy
        if isinstance(made, _Together):
            waiting = len(self._together)  # a turn takes all of a queue, and what it does not end comes back to it
        else:
            of_models = [one for q in self._queues.values() if isinstance(q, _Numbered) for one in q.waiting.values()]
            waiting, size = len(of_models), size + sum(one.size for one in of_models)
        if (waiting + count > self.most_waiting or size > MOST_WAITING_BYTES) and not next:
            raise Busy

    def _promise(self, key: Hashable, model: str | None) -> Promise:
        self._forget()
        id = f"{self._name}-{next(self._ids)}" + ("" if model is None else f"{OF}{model}")
        promise = Promise(id, model, asked_at=self.clock())
        self._promises[promise.id] = self._by_key[key] = promise
        return promise

    def _forget(self) -> None:
        """Forgets results that were kept for long enough."""
        now = self.clock()
        if now - self._looked < LOOK_S:
            return
        self._looked, before = now, now - KEPT_S
        done = [p for p in self._promises.values() if p.result is not None]
        old = {p.id for p in done if p.done_at < before} | self._too_much(done, now)
        if old:
            forgotten = [p.result for p in done if p.id in old and p.result is not None and p.fetched_at is None]
            self._unfetched -= sum(len(result.body) for result in forgotten)
            self._promises = {id: p for id, p in self._promises.items() if id not in old}
            self._by_key = {key: p for key, p in self._by_key.items() if p.id not in old}

    @staticmethod
    def _too_much(done: Sequence[Promise], now: float) -> set[str]:
        """Returns the promises, of those that came to something, that are forgotten before their time: the first that
        were fetched, then the first that nobody wants, so many that the rest has MOST_BYTES."""
        sizes = {p.id: len(p.result.body) for p in done if p.result is not None}
        excess, found = sum(sizes.values()) - MOST_BYTES, set[str]()
        fetched = [(p.fetched_at, p.id) for p in done if p.fetched_at is not None and p.fetched_at < now - FETCHED_S]
        unwanted = [(p.done_at, p.id) for p in done if p.fetched_at is None and p.done_at < now - UNFETCHED_S]
        for _, id in [*sorted(fetched), *sorted(unwanted)]:
            if excess <= 0:
                break
            excess -= sizes[id]
            found.add(id)
        return found

    def fetched(self, promise: Promise) -> None:
        """Says that the result of a promise is on its way to its client."""
        with self._lock:
            if promise.fetched_at is None and promise.result is not None and promise.id in self._promises:
                self._unfetched -= len(promise.result.body)
            promise.fetched_at = self.clock()

    def find(self, id: str) -> Promise:
        """Returns a promise. Raises Gone."""
        with self._lock:
            if id not in self._promises:
                raise Gone
            return self._promises[id]

    def abandon(self, promise: Promise) -> None:
        """Says that nobody waits for a promise any more."""
        with self._lock:
            promise.unwanted = True

    def sift(self, waiting: Sequence[Waiting]) -> tuple[list[Waiting], list[str]]:
        """Returns the operations that somebody waits for, and the ids of the promises of the others, which fail."""
        for one in waiting:
            if one.promise.unwanted:
                self.fail(one.promise, "user", "its client has hung up")
        wanted = [one for one in waiting if not one.promise.unwanted]
        return wanted, [one.promise.id for one in waiting if one.promise.unwanted]

    def tell(self, promise: Promise, when_done: Callable[[], None]) -> None:
        """Calls `when_done` when the promise is done, or nothing more is; at once where that is so."""
        with self._lock:
            if promise.result is None and not self._ended:
                promise.told.append(when_done)
                return
        when_done()

    def tell_no_more(self, promise: Promise, when_done: Callable[[], None]) -> None:
        """Undoes `tell`: a client that waits for hours asks anew every HOLD_S seconds."""
        with self._lock:
            if when_done in promise.told:
                promise.told.remove(when_done)

    # -- of the ranks ------------------------------------------------------------------------------------------------

    def take(self, timeout_s: float) -> Turn | None:
        """Returns the next turn, of the queue that has waited for longest; None where nothing comes within the time."""
        with self._lock:
            self._lock.wait_for(self._any_ready, timeout_s)
            self._gather()
            for queue in self._turns:
                made = self._queues[queue]
                if made.ready():
                    self._turns.remove(queue)
                    self._turns.append(queue)
                    taken = made.take()
                    if isinstance(made, _Together):
                        del self._queues[queue]
                        self._turns.remove(queue)
                    return Turn(queue, taken)
            return None

    def _any_ready(self) -> bool:
        return any(made.ready() for made in self._queues.values())

    def _gather(self) -> None:
        """Waits for what comes soon after something of its kind, where nothing else could be done meanwhile."""
        ready = [made for made in self._queues.values() if made.ready()]
        if len(ready) != 1 or not isinstance(ready[0], _Together) or not ready[0].more:
            return
        [made], began, count = ready, time.monotonic(), 0
        while len(made.waiting) != count and (left := began + GATHER_MOST_S - time.monotonic()) > 0:
            count = len(made.waiting)
            self._lock.wait(min(GATHER_S, left))

    def put_back(self, queue: Hashable, waiting: Sequence[Waiting], *, more: bool = False) -> None:
        """Puts operations that are not done back on a queue of those that are done together, before what has come.

        more: whether others are likely to come soon, of clients whose operations were done."""
        with self._lock:
            if queue not in self._queues:
                self._add(queue, _Together())
            made = self._queues[queue]
            assert isinstance(made, _Together)
            made.waiting = [*waiting, *made.waiting]
            made.more = made.more or more

    def finish(self, promise: Promise, result: Result) -> None:
        """Says what a promise came to."""
        with self._lock:
            self._unfetched += len(result.body)
            promise.result, promise.done_at = result, self.clock()
            self._together.discard(promise.id)
            told, promise.told = promise.told, []
        for each in told:
            each()

    def fail(self, promise: Promise, category: Category, line: str) -> None:
        """Says that a promise came to nothing, and why."""
        self.finish(promise, failed(category, line))

    def give_back(self, why: str) -> list[Any]:
        """Fails what waits on the queues of models, and returns it; the next operation of each comes after it."""
        left: list[Waiting] = []
        with self._lock:
            for made in self._queues.values():
                if isinstance(made, _Numbered) and made.waiting:
                    left += made.leave()
        for waiting in left:
            self.fail(waiting.promise, "server", why)
        return [waiting.operation for waiting in left]

    def close(self, why: str) -> None:
        """Takes nothing more: what arrives is told to come again, what waits goes on."""
        with self._lock:
            self._closed = why

    def end(self) -> None:
        """Tells all who wait for a promise that nothing more is done: the server ends."""
        with self._lock:
            self._ended = True
            told = [each for promise in self._promises.values() for each in promise.told]
        for each in told:
            each()

    # -- from one start to the next ------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Returns, as JSON, which number each model's queue is at, and the results that may yet be asked for."""
        with self._lock:
            results = [
                {
                    "queue": key[0], "number": key[1], "id": promise.id, "model": promise.model,
                    "media_type": promise.result.media_type, "body": base64.b64encode(promise.result.body).decode(),
                }
                for key, promise in self._by_key.items()
                if isinstance(key, tuple) and key[0] in self._queues and promise.result is not None
            ]  # fmt: skip
            numbers = {queue: made.next for queue, made in self._queues.items() if isinstance(made, _Numbered)}
            return {"numbers": numbers, "results": results}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state` of an earlier start gave."""
        with self._lock:
            for queue, number in state["numbers"].items():
                self._add(queue, _Numbered(int(number)))
            for one in state["results"]:
                result = Result(base64.b64decode(one["body"], validate=True), one["media_type"])
                promise = Promise(one["id"], one["model"], result, done_at=self.clock())
                self._promises[promise.id] = self._by_key[one["queue"], one["number"]] = promise
                self._unfetched += len(result.body)


def failed(category: Category, line: str) -> Result:
    """Returns the result of a call that failed, as the client shows it."""
    return Result(json.dumps({"error": line, "category": category}).encode())
