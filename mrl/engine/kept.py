"""What stays of conversations between two calls of `BaseEngine.generate`, and which replica has it. No tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from mrl.engine.requests import GenerateRequest
from mrl.engine.sampling import SamplingKey


def share(count: int, part: int, parts: int) -> range:
    """Returns which of `count` requests a replica (or an engine of vLLM's) takes: neighbours, because samples of one
    prompt share its prefill."""
    return range(count * part // parts, count * (part + 1) // parts)


class Rows(Protocol):
    """A cache, of which a row can be copied out and put back (`mrl.mcore_models.kv_cache.KVCache`)."""

    def copy_row(self, row: int, places: int) -> Any: ...

    def put_row(self, row: int, copy: Any) -> None: ...


class Ended(Protocol):
    """A sequence that is complete (of `mrl.engine.generation`)."""

    request: GenerateRequest
    context: list[int]  # the prompt and what followed
    cached: int  # how many of these the cache has
    row: int  # of the cache


class KeptSequences:
    """Keys and values of sequences that stay on the device from one `generate` to the next, for requests that go on.

    A request goes on with the sequence of its key, which no other has, where its tokens begin with that sequence's.
    What no request of a call goes on with is forgotten. Weights must not change between the calls. room: tokens that
    each replica of the model keeps at most, beside the cache_tokens of the call; a sequence that finds none free is fed
    from its first token again.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        # tokens, and a copy for each chunk of the model
        self._copies: dict[SamplingKey, tuple[list[int], list[Any]]] = {}
        self._replicas: dict[SamplingKey, int] = {}

    @property
    def tokens(self) -> int:
        """How many are kept here."""
        return sum(len(tokens) for tokens, _ in self._copies.values())

    def share(self, requests: Sequence[GenerateRequest], part: int, parts: int) -> list[int]:
        """As the function `share`; but where anything is kept, a request stays with the replica that had its key."""
        if not self.room:
            return list(share(len(requests), part, parts))
        fresh = [request.key for request in requests if request.key not in self._replicas]
        for replica in range(parts):
            self._replicas |= {fresh[i]: replica for i in share(len(fresh), replica, parts)}
        return [i for i, request in enumerate(requests) if self._replicas[request.key] == part]

    def begin(self, requests: Sequence[GenerateRequest]) -> None:
        """Forgets what none of the requests goes on with."""
        wanted = {request.key: list(request.tokens) for request in requests}
        for key, (tokens, _) in list(self._copies.items()):
            if wanted.get(key, [])[: len(tokens)] != tokens or len(tokens) == len(wanted[key]):
                del self._copies[key]

    def length(self, key: SamplingKey) -> int:
        """Returns how many of the first tokens of the sequence with this key are kept."""
        return len(self._copies[key][0]) if key in self._copies else 0

    def restore(self, restored: Sequence[tuple[int, SamplingKey]], cache: Rows, chunk: int = 0) -> None:
        """Puts what a step asks for into the cache of a chunk of the model."""
        for row, key in restored:
            cache.put_row(row, self._copies[key][1][chunk])

    def keep(self, ended: Sequence[Ended], caches: Sequence[Rows]) -> None:
        """Copies the rows of sequences that have ended, where there is room. caches: of this rank's chunks."""
        for s in ended:
            key = s.request.key
            if self.tokens - self.length(key) + s.cached <= self.room:
                self._copies[key] = (s.context[: s.cached], [cache.copy_row(s.row, s.cached) for cache in caches])
