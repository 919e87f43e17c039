"""The queues of the server: clients' requests wait on them, and their results are fetched.

Requests arrive on the thread of the HTTP server and get a future at once. The main thread alone computes. It takes one
operation of a model, or all samples that wait for one snapshot. Models take turns. A model's operations run in the
order of their numbers, whatever order they arrived in.
"""

from __future__ import annotations

import base64
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

FETCHED_S = 300.0
"""The same for a fetched result, whose answer may have been lost."""

OVERDUE_S = 400.0
"""Seconds that calls wait for one with a lower number: a client tries for 300 s to send it."""

MODEL_SEPARATOR = "@"
"""It stands before the model's name in a future's id. If the future is not known any more, the client is told the
model's state. It shows an answer of 410 only as `Promise expired/broken`."""

MAX_RESULT_BYTES = 2**32
"""Bytes of all kept results, above which nothing more is taken."""

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

    def is_old(self, now: float) -> bool:
        """Returns whether nobody is likely to ask for its result any more."""
        if self.result is None:
            return False
        return self.done_at < now - KEPT_S or (self.fetched_at is not None and self.fetched_at < now - FETCHED_S)


@dataclasses.dataclass(eq=False)
class QueuedRequest:
    """An operation on a queue with its future."""

    operation: Any
    future: Future


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
    """Queues requests of one model in the order of their ids."""

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
    """Queues requests that are done together."""

    def __init__(self) -> None:
        self.waiting: list[QueuedRequest] = []

    def ready(self) -> bool:
        return bool(self.waiting)

    def take(self) -> list[QueuedRequest]:
        taken, self.waiting = self.waiting, []
        return taken


class RequestQueue:
    """Queues the requests of one server and keeps their futures. Every method may be called on any thread."""

    def __init__(self, *, max_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_waiting, self.clock = max_waiting, clock
        self._lock = threading.Condition()
        self._queues: dict[Hashable, _OrderedQueue | _BatchQueue] = {}  # the one that waits longest first
        self._futures: dict[str, Future] = {}
        self._by_key: dict[Hashable, Future] = {}
        self._name, self._ids = secrets.token_hex(4), itertools.count(1)  # no id of an earlier start comes again
        self._closed = self._ended = False
        self._batched: set[str] = set()  # futures of batched operations without a result, drawn or waiting
        self._last_expiry_check = clock()
        self._kept = 0  # bytes of results

    # -- of clients --------------------------------------------------------------------------------------------------

    def open(self, queue: Hashable, *, first: int) -> None:
        """Makes the queue of a model. Its first operation has the number `first`."""
        with self._lock:
            self._queues[queue] = _OrderedQueue(first)

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
            left = list(made.waiting.values() if isinstance(made, _OrderedQueue) else made.waiting)
        for waiting in left:
            self.fail(waiting.future, "user", str(why))

    def check_room(self, count: int) -> None:
        """Raises QueueFull if there is no room for `count` batched operations, and UserError if there never is."""
        if count > self.max_waiting:
            fix = f"send at most {self.max_waiting} at a time, or raise serve.max_waiting"
            raise UserError("prompt", why=f"is {count} prompts", fix=fix)
        with self._lock:
            self._check_room(len(self._batched) + count)

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

    def put(self, queue: Hashable, number: int, operation: Any, *, model: str | None = None) -> Future:
        """Puts an operation of a model on its queue. The same number gets the first future again.

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
            calls = sum(len(each.waiting) for each in self._queues.values() if isinstance(each, _OrderedQueue))
            self._check_room(0 if number == made.next else calls + 1)
            future = self._new_future(key, model)
            made.refused.discard(number)
            made.waiting[number] = QueuedRequest(operation, future)
            self._lock.notify_all()
            return future

    def put_batched(self, queue: Hashable, key: Hashable, operation: Any) -> Future:
        """Puts an operation on a queue whose operations are done together. The same key gets the first future again.

        Raises QueueFull.
        """
        with self._lock:
            if key in self._by_key:
                return self._by_key[key]
            made = self._queues.setdefault(queue, _BatchQueue())
            assert isinstance(made, _BatchQueue)
            self._check_room(len(self._batched) + 1)  # a turn takes all, and what it does not end comes back
            future = self._new_future(key, None)
            self._batched.add(future.id)
            made.waiting.append(QueuedRequest(operation, future))
            self._lock.notify_all()
            return future

    def _check_room(self, waiting: int) -> None:
        """Raises QueueFull if so many may not wait, too many bytes are kept, or the server ends."""
        self._forget()
        if self._closed or waiting > self.max_waiting or self._kept > MAX_RESULT_BYTES:
            raise QueueFull

    def _new_future(self, key: Hashable, model: str | None) -> Future:
        id = f"{self._name}-{next(self._ids)}" + ("" if model is None else f"{MODEL_SEPARATOR}{model}")
        future = Future(id, model, asked_at=self.clock())
        self._futures[future.id] = self._by_key[key] = future
        return future

    def _forget(self) -> None:
        """Forgets results that were kept for long enough."""
        now = self.clock()
        if now - self._last_expiry_check < EXPIRY_CHECK_S:
            return
        self._last_expiry_check = now
        self._futures = {id: p for id, p in self._futures.items() if not p.is_old(now)}
        self._by_key = {key: p for key, p in self._by_key.items() if p.id in self._futures}
        self._kept = sum(len(p.result.body) for p in self._futures.values() if p.result is not None)

    def find(self, id: str) -> Future:
        """Returns a future. Raises FutureExpired."""
        with self._lock:
            if id not in self._futures:
                raise FutureExpired
            return self._futures[id]

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

    # -- of the ranks ------------------------------------------------------------------------------------------------

    def next_work(self, timeout_s: float) -> Work | None:
        """Returns the work of the queue that has waited longest; None if nothing comes within the time."""
        with self._lock:
            self._lock.wait_for(lambda: any(made.ready() for made in self._queues.values()), timeout_s)
            for queue, made in self._queues.items():
                if made.ready():
                    del self._queues[queue]
                    if isinstance(made, _OrderedQueue):
                        self._queues[queue] = made  # at the end
                    return Work(queue, made.take())
            return None

    def put_back(self, queue: Hashable, waiting: Sequence[QueuedRequest]) -> None:
        """Puts unfinished batched operations back on their queue, before those that have come."""
        with self._lock:
            made = self._queues.setdefault(queue, _BatchQueue())
            assert isinstance(made, _BatchQueue)
            made.waiting = [*waiting, *made.waiting]

    def finish(self, future: Future, result: Result) -> None:
        """Sets the result of a future."""
        with self._lock:
            future.result, future.done_at = result, self.clock()
            self._kept += len(result.body)
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

    def close(self) -> None:
        """Takes nothing more: new requests are told to come again, waiting ones continue."""
        self._closed = True

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
                self._queues[queue] = _OrderedQueue(int(number))
            for one in state["results"]:
                result = Result(base64.b64decode(one["body"], validate=True), one["media_type"])
                future = Future(one["id"], one["model"], result, done_at=self.clock())
                self._futures[future.id] = self._by_key[one["queue"], one["number"]] = future


def error_result(category: Category, line: str) -> Result:
    """Returns the result of a call that failed, as the client shows it."""
    return Result(json.dumps({"error": line, "category": category}).encode())
