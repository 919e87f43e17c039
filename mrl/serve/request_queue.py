"""The queues of the server: clients' requests wait on them, and their results are fetched.

Requests arrive on the thread of the HTTP server and get a future at once. The main thread alone computes. It takes one
operation of a model, or all samples that wait for one snapshot. Models take turns. A model's operations run in the
order of their numbers, whatever order they arrived in.
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
"""Seconds that a result is kept: after a broken connection a client asks again within 300 s."""

FETCHED_S = 120.0
"""The same for a fetched result, if all kept ones have more than MAX_RESULT_BYTES: a client asks again for a lost
answer within 45 s."""

MAX_RESULT_BYTES = 2**28
"""Bytes of results that are kept for KEPT_S, whether they were fetched or not: log-probs of long data are megabytes."""

MAX_UNFETCHED_BYTES = 2**30
"""Bytes of results that nobody has fetched. Above that nothing more is taken until some are fetched or out of date."""

MAX_WAITING_BYTES = 2**31
"""Bytes of the calls of models that wait at once."""

UNFETCHED_S = 400.0
"""Seconds after which a result that nobody has fetched is dropped, if there are too many."""

OVERDUE_S = 400.0
"""Seconds that calls wait for one with a lower number: a client tries for 300 s to send it."""

GATHER_S, GATHER_MAX_S = 0.01, 0.25
"""Seconds that a turn waits for the next of a burst of samples, and for all of them: a batch costs little more than one
sample. Clients that waited for one turn come back together."""

MODEL_SEPARATOR = "@"
"""It stands before the model's name in a future's id. If the future is not known any more, the client is told the
model's state. It shows an answer of 410 only as `Promise expired/broken`."""

EXPIRY_CHECK_S = 10.0
"""How often out-of-date results are looked for: a look goes through all that are kept."""


@dataclasses.dataclass(frozen=True)
class Result:
    """The body of a finished operation."""

    body: bytes
    media_type: str = JSON


@dataclasses.dataclass(eq=False)
class Future:
    """The result of an operation, once it is done."""

    id: str
    model: str | None = None
    result: Result | None = None
    asked_at: float = 0.0
    done_at: float = 0.0
    fetched_at: float | None = None
    abandoned: bool = False  # nobody will ask for it
    callbacks: list[Callable[[], None]] = dataclasses.field(default_factory=list)  # called when it is done


@dataclasses.dataclass(eq=False)
class QueuedRequest:
    """An operation on a queue with its future."""

    operation: Any
    future: Future
    size: int = 0  # bytes that it holds


@dataclasses.dataclass(frozen=True)
class Work:
    """The next requests for the ranks, from one queue."""

    queue: Hashable
    requests: Sequence[QueuedRequest]


class QueueFull(Exception):
    """A queue has no room; ask again later."""


class FutureExpired(Exception):
    """A future is not known: its result was kept for KEPT_S seconds, or the server has been restarted."""


class _OrderedQueue:
    """Queue requests of one model in the order of their ids."""

    def __init__(self, first: int) -> None:
        self.next = first
        self.waiting: dict[int, QueuedRequest] = {}
        self.refused: set[int] = set()  # numbers that are not waited for

    def ready(self) -> bool:
        return self.next in self.waiting

    def take(self) -> list[QueuedRequest]:
        self.next += 1
        taken = [self.waiting.pop(self.next - 1)]
        self.skip_refused()
        return taken

    def take_all(self) -> list[QueuedRequest]:
        """Takes all waiting requests off the queue. Its next operation comes after them."""
        left = list(self.waiting.values())
        self.next = max(self.waiting) + 1
        self.waiting.clear()
        self.skip_refused()
        return left

    def skip_refused(self) -> None:
        while self.next in self.refused:
            self.refused.remove(self.next)
            self.next += 1


class _BatchQueue:
    """Queue requests that are done together."""

    def __init__(self) -> None:
        self.waiting: list[QueuedRequest] = []
        self.expects_more = False  # whether others are likely to come soon

    def ready(self) -> bool:
        return bool(self.waiting)

    def take(self) -> list[QueuedRequest]:
        taken, self.waiting = self.waiting, []
        return taken


class RequestQueue:
    """Queue the requests of one server and keep their futures. Every method may be called on any thread."""

    def __init__(self, *, max_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_waiting, self.clock = max_waiting, clock
        self._lock = threading.Condition()
        self._queues: dict[Hashable, _OrderedQueue | _BatchQueue] = {}
        self._turns: collections.deque[Hashable] = collections.deque()  # every queue, the one that waits longest first
        self._futures: dict[str, Future] = {}
        self._by_key: dict[Hashable, Future] = {}
        self._name, self._ids = secrets.token_hex(4), itertools.count(1)  # no id of an earlier start comes again
        self._closed: str | None = None
        self._ended = False
        self._unfetched = 0  # bytes
        self._batched: set[str] = set()  # futures of batched operations without a result, drawn or waiting
        self._last_expiry_check = clock()

    # -- of clients --------------------------------------------------------------------------------------------------

    def open(self, queue: Hashable, *, first: int) -> None:
        """Makes the queue of a model. Its first operation has the number `first`."""
        with self._lock:
            self._add(queue, _OrderedQueue(first))

    def _add(self, queue: Hashable, made: _OrderedQueue | _BatchQueue) -> None:
        self._queues[queue] = made
        self._turns.append(queue)

    def has(self, queue: Hashable) -> bool:
        """Returns whether a model has a queue."""
        with self._lock:
            return queue in self._queues

    def has_work(self, queue: Hashable) -> bool:
        """Returns whether a queue has something to do."""
        with self._lock:
            return queue in self._queues and self._queues[queue].ready()

    def drop(self, queue: Hashable, why: UserError) -> None:
        """Ends a queue; its waiting requests fail."""
        with self._lock:
            made = self._queues.pop(queue, None)
            if made is None:
                return
            self._turns.remove(queue)
            left = list(made.waiting.values() if isinstance(made, _OrderedQueue) else made.waiting)
        for waiting in left:
            self.fail(waiting.future, "user", str(why))

    def check_open(self) -> None:
        """Raises QueueFull if nothing more is taken."""
        with self._lock:
            if self._closed is not None:
                raise QueueFull

    def check_room(self, count: int) -> None:
        """Raises QueueFull if there is no room for `count` batched operations, and UserError if there never is."""
        if count > self.max_waiting:
            fix = f"send at most {self.max_waiting} at a time, or raise serve.max_waiting"
            raise UserError("prompt", why=f"is {count} prompts", fix=fix)
        with self._lock:
            self._check_room(_BatchQueue(), count)

    def future_of(self, queue: Hashable, number: Hashable) -> Future | None:
        """Returns the future that was promised for a number or another key; None if there is none.

        A call that was right then may be refused now.
        """
        with self._lock:
            return self._by_key.get((queue, number))

    def refuse(self, queue: Hashable, number: int) -> None:
        """Records that the operation with this number will not come: those after it do not wait for it."""
        with self._lock:
            made = self._queues.get(queue)
            if isinstance(made, _OrderedQueue) and number >= made.next and number not in made.waiting:
                made.refused.add(number)
                made.skip_refused()
                self._lock.notify_all()

    def fail_overdue(self) -> dict[Hashable, int]:
        """Fails requests that have waited OVERDUE_S seconds for a lower number, and continues after it.

        Returns the missing numbers, by the queues that waited for them.
        """
        left: list[tuple[int, QueuedRequest]] = []
        lacked: dict[Hashable, int] = {}
        with self._lock:
            before = self.clock() - OVERDUE_S
            for queue, made in self._queues.items():
                if not isinstance(made, _OrderedQueue) or made.ready() or not made.waiting:
                    continue
                if min(waiting.future.asked_at for waiting in made.waiting.values()) < before:
                    lacked[queue] = lacking = made.next
                    left += [(lacking, waiting) for waiting in made.take_all()]
        why, fix = "has not come, and later ones waited for it", "look at the client's first error, and send them again"
        for lacking, waiting in left:
            self.fail(waiting.future, "user", str(UserError("seq_id", lacking, why, fix)))
        return lacked

    def put(self, queue: Hashable, number: int, operation: Any, *, model: str | None = None, size: int = 0) -> Future:
        """Puts an operation of a model on its queue. The same number gets the first future again. size: its bytes.

        Raises KeyError if there is no such queue, and QueueFull. There is always room for a model's next operation, so
        neither others' operations nor its own early ones stop a model.
        """
        key = (queue, number)
        with self._lock:
            if key in self._by_key:
                return self._by_key[key]
            made = self._queues[queue]
            assert isinstance(made, _OrderedQueue)
            if number < made.next:  # it was done, and its result is no longer kept: it is not to be done twice
                return Future(f"gone-{number}{MODEL_SEPARATOR}{model}", model)
            self._check_room(made, size=size, next=number == made.next)
            future = self._new_future(key, model)
            made.refused.discard(number)
            made.waiting[number] = QueuedRequest(operation, future, size)
            self._lock.notify_all()
            return future

    def put_batched(self, queue: Hashable, key: Hashable, operation: Any) -> Future:
        """Puts an operation on a queue whose operations are done together. The same key gets the first future again.

        Raises QueueFull.
        """
        with self._lock:
            if key in self._by_key:
                return self._by_key[key]
            if queue not in self._queues:
                self._add(queue, _BatchQueue())
            made = self._queues[queue]
            assert isinstance(made, _BatchQueue)
            self._check_room(made)
            future = self._new_future(key, None)
            self._batched.add(future.id)
            made.waiting.append(QueuedRequest(operation, future))
            made.expects_more = True
            self._lock.notify_all()
            return future

    def _check_room(
        self, made: _OrderedQueue | _BatchQueue, count: int = 1, *, size: int = 0, next: bool = False
    ) -> None:
        if self._unfetched > MAX_UNFETCHED_BYTES:
            self._forget()
        if self._closed is not None or self._unfetched > MAX_UNFETCHED_BYTES:
            raise QueueFull
        if isinstance(made, _BatchQueue):
            waiting = len(self._batched)  # a turn takes all of a queue, and what it does not end comes back to it
        else:
            queues = [queue for queue in self._queues.values() if isinstance(queue, _OrderedQueue)]
            calls = [one for queue in queues for one in queue.waiting.values()]
            waiting, size = len(calls), size + sum(one.size for one in calls)
        if (waiting + count > self.max_waiting or size > MAX_WAITING_BYTES) and not next:
            raise QueueFull

    def _new_future(self, key: Hashable, model: str | None) -> Future:
        self._forget()
        id = f"{self._name}-{next(self._ids)}" + ("" if model is None else f"{MODEL_SEPARATOR}{model}")
        future = Future(id, model, asked_at=self.clock())
        self._futures[future.id] = self._by_key[key] = future
        return future

    def _forget(self) -> None:
        """Forgets results that were kept for long enough."""
        now = self.clock()
        if now - self._last_expiry_check < EXPIRY_CHECK_S:
            return
        self._last_expiry_check, before = now, now - KEPT_S
        done = [p for p in self._futures.values() if p.result is not None]
        old = {p.id for p in done if p.done_at < before} | self._evicted(done, now)
        if old:
            forgotten = [p.result for p in done if p.id in old and p.result is not None and p.fetched_at is None]
            self._unfetched -= sum(len(result.body) for result in forgotten)
            self._futures = {id: p for id, p in self._futures.items() if id not in old}
            self._by_key = {key: p for key, p in self._by_key.items() if p.id not in old}

    @staticmethod
    def _evicted(done: Sequence[Future], now: float) -> set[str]:
        """Returns the ids of finished futures to forget before their time.

        The first ones fetched go first, then the first ones that nobody wants, until the rest has MAX_RESULT_BYTES.
        """
        sizes = {p.id: len(p.result.body) for p in done if p.result is not None}
        excess, found = sum(sizes.values()) - MAX_RESULT_BYTES, set[str]()
        fetched = [(p.fetched_at, p.id) for p in done if p.fetched_at is not None and p.fetched_at < now - FETCHED_S]
        unwanted = [(p.done_at, p.id) for p in done if p.fetched_at is None and p.done_at < now - UNFETCHED_S]
        for _, id in [*sorted(fetched), *sorted(unwanted)]:
            if excess <= 0:
                break
            excess -= sizes[id]
            found.add(id)
        return found

    def mark_fetched(self, future: Future) -> None:
        """Records that the result of a future is on its way to its client."""
        with self._lock:
            if future.fetched_at is None and future.result is not None and future.id in self._futures:
                self._unfetched -= len(future.result.body)
            future.fetched_at = self.clock()

    def find(self, id: str) -> Future:
        """Returns a future. Raises FutureExpired."""
        with self._lock:
            if id not in self._futures:
                raise FutureExpired
            return self._futures[id]

    def abandon(self, future: Future) -> None:
        """Records that nobody waits for a future any more."""
        with self._lock:
            future.abandoned = True

    def split_abandoned(self, waiting: Sequence[QueuedRequest]) -> tuple[list[QueuedRequest], list[str]]:
        """Fails abandoned requests. Returns the other requests, and the ids of the abandoned ones' futures."""
        for one in waiting:
            if one.future.abandoned:
                self.fail(one.future, "user", "its client has hung up")
        wanted = [one for one in waiting if not one.future.abandoned]
        return wanted, [one.future.id for one in waiting if one.future.abandoned]

    def add_callback(self, future: Future, when_done: Callable[[], None]) -> None:
        """Calls `when_done` when the future is done or the server ends; at once if that is so already."""
        with self._lock:
            if future.result is None and not self._ended:
                future.callbacks.append(when_done)
                return
        when_done()

    def remove_callback(self, future: Future, when_done: Callable[[], None]) -> None:
        """Undoes `add_callback`. A client that waits for hours asks again every HOLD_S seconds."""
        with self._lock:
            if when_done in future.callbacks:
                future.callbacks.remove(when_done)

    # -- of the ranks ------------------------------------------------------------------------------------------------

    def next_work(self, timeout_s: float) -> Work | None:
        """Returns the work of the queue that has waited longest; None if nothing comes within the time."""
        with self._lock:
            self._lock.wait_for(lambda: any(made.ready() for made in self._queues.values()), timeout_s)
            self._gather()
            for queue in self._turns:
                made = self._queues[queue]
                if made.ready():
                    self._turns.remove(queue)
                    self._turns.append(queue)
                    taken = made.take()
                    if isinstance(made, _BatchQueue):
                        del self._queues[queue]
                        self._turns.remove(queue)
                    return Work(queue, taken)
            return None

    def _gather(self) -> None:
        """Waits for more requests that are likely to come soon, if nothing else could be done meanwhile."""
        ready = [made for made in self._queues.values() if made.ready()]
        if len(ready) != 1 or not isinstance(ready[0], _BatchQueue) or not ready[0].expects_more:
            return
        [made], began, count = ready, time.monotonic(), 0
        while len(made.waiting) != count and (left := began + GATHER_MAX_S - time.monotonic()) > 0:
            count = len(made.waiting)
            self._lock.wait(min(GATHER_S, left))

    def put_back(self, queue: Hashable, waiting: Sequence[QueuedRequest], *, expects_more: bool = False) -> None:
        """Puts unfinished batched operations back on their queue, before those that have come.

        expects_more: whether others are likely to come soon, from clients whose operations were done.
        """
        with self._lock:
            if queue not in self._queues:
                self._add(queue, _BatchQueue())
            made = self._queues[queue]
            assert isinstance(made, _BatchQueue)
            made.waiting = [*waiting, *made.waiting]
            made.expects_more = made.expects_more or expects_more

    def finish(self, future: Future, result: Result) -> None:
        """Sets the result of a future."""
        with self._lock:
            self._unfetched += len(result.body)
            future.result, future.done_at = result, self.clock()
            self._batched.discard(future.id)
            callbacks, future.callbacks = future.callbacks, []
        for each in callbacks:
            each()

    def fail(self, future: Future, category: Category, line: str) -> None:
        """Sets the error of a future."""
        self.finish(future, error_result(category, line))

    def fail_waiting(self, why: str) -> list[Any]:
        """Fails all requests that wait on the queues of models, and returns their operations. Later ones come after
        them."""
        left: list[QueuedRequest] = []
        with self._lock:
            for made in self._queues.values():
                if isinstance(made, _OrderedQueue) and made.waiting:
                    left += made.take_all()
        for waiting in left:
            self.fail(waiting.future, "server", why)
        return [waiting.operation for waiting in left]

    def close(self, why: str) -> None:
        """Takes nothing more: new requests are told to come again, waiting ones continue."""
        with self._lock:
            self._closed = why

    def end(self) -> None:
        """Tells all who wait for a future that nothing more is done: the server ends."""
        with self._lock:
            self._ended = True
            callbacks = [each for future in self._futures.values() for each in future.callbacks]
        for each in callbacks:
            each()

    # -- from one start to the next ------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Returns, as JSON, the next number of each model's queue, and the results that may yet be asked for."""
        with self._lock:
            results = [
                {
                    "queue": key[0], "number": key[1], "id": future.id, "model": future.model,
                    "media_type": future.result.media_type, "body": base64.b64encode(future.result.body).decode(),
                }
                for key, future in self._by_key.items()
                if isinstance(key, tuple) and key[0] in self._queues and future.result is not None
            ]  # fmt: skip
            numbers = {queue: made.next for queue, made in self._queues.items() if isinstance(made, _OrderedQueue)}
            return {"numbers": numbers, "results": results}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes over the `state` of an earlier start."""
        with self._lock:
            for queue, number in state["numbers"].items():
                self._add(queue, _OrderedQueue(int(number)))
            for one in state["results"]:
                result = Result(base64.b64decode(one["body"], validate=True), one["media_type"])
                future = Future(one["id"], one["model"], result, done_at=self.clock())
                self._futures[future.id] = self._by_key[one["queue"], one["number"]] = future
                self._unfetched += len(result.body)


def error_result(category: Category, line: str) -> Result:
    """Returns the result of a call that failed, as the client shows it."""
    return Result(json.dumps({"error": line, "category": category}).encode())
