"""Keeps conversations between two calls of `BaseEngine.generate`, and which replica has each. No tensors."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from mrl.engine.requests import ActiveRequest, GenerateRequest
from mrl.engine.sampling import SamplingKey
from mrl.ops.kv_cache import KVCache, RowCopy


def share(count: int, part: int, parts: int) -> range:
    """Returns which of `count` requests a replica (or an engine of vLLM's) takes: neighbours, because samples of one
    prompt share its prefill."""
    return range(count * part // parts, count * (part + 1) // parts)


@dataclasses.dataclass
class _KeptSequence:
    """Holds an ended sequence and copies of its cache rows."""

    tokens: list[int]  # the first ones of the copies, those that can be used
    places: int  # positions of each copy
    copies: list[RowCopy]  # one for each chunk of the model


@dataclasses.dataclass
class PreparedWeights:
    """Holds weights in the form that an engine samples with. Calls of `generate` share them while weights do not
    change."""

    value: Any = None


class KeptSequences:
    """Keeps keys and values of sequences on the device between `generate` calls, for requests that continue them.

    A request continues the sequence with its key, as far as both have the same tokens. If several requests of a call
    have one key, they are fed from their first tokens, because other settings may have drawn other tokens. Sequences
    that no request of a call continues are dropped. Weights must not change between the calls. room: the most tokens
    that each replica of the model keeps, beside the cache_tokens of the call. A sequence without free room is fed
    again. prepared: shared with other instances of the same weights; None: this one's own.
    """

    def __init__(self, room: int, prepared: PreparedWeights | None = None) -> None:
        self.room = room
        self.prepared = PreparedWeights() if prepared is None else prepared
        self._kept: dict[SamplingKey, _KeptSequence] = {}
        self._replicas: dict[SamplingKey, int] = {}

    @property
    def tokens(self) -> int:
        """Returns the number of tokens that are kept here."""
        return sum(one.places for one in self._kept.values())

    def share(self, requests: Sequence[GenerateRequest], part: int, parts: int) -> list[int]:
        """Returns this replica's requests, as the function `share`; a request stays with the replica that had its
        key."""
        if not self.room:
            return list(share(len(requests), part, parts))
        known = {request.key for request in requests}
        self._replicas = {key: replica for key, replica in self._replicas.items() if key in known}
        fresh = [request.key for request in requests if request.key not in self._replicas]
        for replica in range(parts):
            self._replicas |= {fresh[i]: replica for i in share(len(fresh), replica, parts)}
        return [i for i, request in enumerate(requests) if self._replicas[request.key] == part]

    def begin(self, requests: Sequence[GenerateRequest], *, recurrent: bool = False) -> None:
        """Drops what none of the requests continues. recurrent: sequences can be continued as a whole only.

        A chat template may remove part of a turn, such as thinking; the tokens before that stay. At least one token is
        fed, because the model's output after it is needed.
        """
        count = collections.Counter(request.key for request in requests)
        wanted = {request.key: request.tokens[:-1] for request in requests if count[request.key] == 1}
        for key, one in list(self._kept.items()):
            pairs = zip(one.tokens, wanted.get(key, ()), strict=False)
            same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            one.tokens = one.tokens[:same]
            if not same or recurrent and same < one.places:
                del self._kept[key]

    def shrink(self, room: int) -> None:
        """Keeps no more than `room` tokens from now on, and drops sequences without room."""
        self.room = room
        for key in list(self._kept):
            if self.tokens > room:
                del self._kept[key]

    def length(self, key: SamplingKey) -> int:
        """Returns how many of the first tokens of the sequence with this key are kept."""
        return len(self._kept[key].tokens) if key in self._kept else 0

    def restore(self, restored: Sequence[tuple[int, SamplingKey]], cache: KVCache, chunk: int = 0) -> None:
        """Copies the rows that a step restores into the cache of a chunk of the model."""
        for row, key in restored:
            cache.put_row(row, self._kept[key].copies[chunk], self.length(key))

    def keep(self, ended: Sequence[ActiveRequest], caches: Sequence[KVCache]) -> None:
        """Copies the rows of ended sequences, as far as there is room. caches: those of this rank's chunks."""
        for s in ended:
            key = s.request.key
            replaced = self._kept[key].places if key in self._kept else 0
            if self.tokens - replaced + s.cached <= self.room:
                copies = [cache.copy_row(s.row, s.cached) for cache in caches]
                self._kept[key] = _KeptSequence(s.context[: s.cached], s.cached, copies)
