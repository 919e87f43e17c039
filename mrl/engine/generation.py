"""Schedules continuous batching: the tokens of each sequence that a forward of a generation takes. No tensors.

Every running sequence has a row of a key/value cache of fixed size. A step feeds one token of each sequence that is
past its prompt, and a bounded number of prompt tokens of the others. A finished sequence leaves and a waiting one takes
its place. Sequences are in row order. Those with one new token come first, in rows 0, 1, ..., then those with prompts.
Only the last prompt can be fed in part. Equal prompts (the samples of a group) are fed once: while a sequence with the
same prompt runs, a new one copies its row and feeds only the prompt's last token.

Few completions are as long as they may be. So there are many short rows at first. When one is full, all become longer
and fewer within the same memory. Sequences that lose their row wait, and are fed again from their first token. This
does not change the tokens that they draw.

A conversation is several requests, each beginning with all tokens of the previous one. If the caller gives
`KeptSequences`, the keys and values of a finished sequence are copied out of its row. They are copied back into a row
for the request that continues it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from mrl.engine.kept import KeptSequences
from mrl.engine.requests import ActiveRequest, Completion, GenerateRequest
from mrl.engine.sampling import SamplingKey, SamplingRows, key_hash, noise_keys
from mrl.engine.splitmix import to_int64
from mrl.errors import ConfigError

FIRST_NEW_TOKENS = 256
"""New tokens in a row at first, if there is not enough memory for the longest completions of all requests."""


@dataclasses.dataclass(frozen=True)
class Step:
    """Describes one forward. Row `i` of the cache belongs to sequence `i`."""

    shape: tuple[int, int] | None
    """(rows, positions of a row) of the cache from this forward on; None if it stays."""
    copies: list[tuple[int, int, int]]
    """(source row, target row, positions), in order, before the new shape and the forward."""
    new: list[list[int]]  # the tokens of each sequence
    cached: list[int]  # how many tokens of each sequence are in the cache
    sampled: list[int]  # the sequences that get their next token from this forward
    sequences: list[ActiveRequest]
    restored: list[tuple[int, SamplingKey]] = dataclasses.field(default_factory=list)
    """(row, key) of sequences with kept keys and values to put back into their rows (`KeptSequences.restore`)."""

    @property
    def ended(self) -> list[ActiveRequest]:
        """Returns the sequences that this step has completed, after `Schedule.take`."""
        return [s for s in self.sequences if s.done]

    @property
    def last(self) -> list[int]:
        """Returns the index of each sampled sequence's last token among all new ones."""
        ends, total = [], 0
        for tokens in self.new:
            total += len(tokens)
            ends.append(total - 1)
        return [ends[i] for i in self.sampled]

    def sampling(self, device: torch.device) -> SamplingRows:
        chosen = [self.sequences[i] for i in self.sampled]
        keys = noise_keys([s.key_hash for s in chosen], [len(s.context) for s in chosen])
        return SamplingRows.of([s.request.sampling for s in chosen], keys, device)


def check_room(requests: Sequence[GenerateRequest], cache_tokens: int) -> None:
    """Refuses requests of which one alone does not fit into the cache."""
    for i, request in enumerate(requests):
        assert len(request.tokens), f"request {i} has no prompt"
        needed = len(request.tokens) + request.max_new_tokens
        if needed > cache_tokens:
            parts = f"{len(request.tokens)} of its prompt and {request.max_new_tokens} new"
            why = f"is less than the {needed} tokens of request {i} ({parts})"
            fix = f"set it to at least {needed}, or shorten the request"
            raise ConfigError("cache_tokens", cache_tokens, why, fix)


DUMMY = Step(None, [], [[0]], [0], [], [])
"""A forward of one token, for a rank without requests while others need it in their forward."""


class Schedule:
    """Plans the steps of one generation over `requests`, each with its index in the caller's list.

    cache_tokens: tokens whose keys and values are kept at once. `rows` times `length` is never more. prefill_tokens:
    the most prompt tokens of one forward. kept: what earlier calls have kept of these sequences. recurrent: the cache
    holds states, which cannot go back to an earlier token. So a prompt is fed without its last token first, and copied
    before that one is fed.
    """

    def __init__(
        self,
        requests: Sequence[tuple[int, GenerateRequest]],
        *,
        cache_tokens: int,
        prefill_tokens: int,
        kept: KeptSequences | None = None,
        recurrent: bool = False,
    ) -> None:
        self.recurrent = recurrent
        self.sequences = [
            ActiveRequest(r, i, tuple(r.tokens), list(r.tokens), to_int64(key_hash(r.key))) for i, r in requests
        ]
        if kept is not None:
            kept.begin([r for _, r in requests], recurrent=recurrent)
            for s in self.sequences:
                s.kept = kept.length(s.request.key)
        self.waiting = [s for s in self.sequences if not s.done]
        self.running: list[ActiveRequest] = []
        self.cache_tokens, self.prefill_tokens = cache_tokens, prefill_tokens
        count = max(1, len(self.waiting))
        self.longest = max([len(s.prompt) + s.request.max_new_tokens for s in self.waiting], default=1)
        start = max([len(s.prompt) for s in self.waiting], default=0) + FIRST_NEW_TOKENS
        self.length = min(self.longest, max(start, cache_tokens // count), cache_tokens)
        self.rows = min(count, cache_tokens // self.length)
        self._leaders: dict[tuple[int, ...], ActiveRequest] = {}

    @property
    def done(self) -> bool:
        return not self.waiting and not self.running

    def next(self) -> Step:
        """Returns the step to make now. Call `take` with its tokens before the next."""
        shape = self._grow()
        decoding = [s for s in self.running if s.cached == len(s.context) - 1]
        prompts = [s for s in self.running if s.cached < len(s.context) - 1]  # at most one, in the highest row
        followers, fresh = self._admit(self.prefill_tokens - sum(len(s.context) - s.cached for s in prompts))
        copies = self._place(decoding, followers, prompts + fresh)
        restored = [(s.row, s.request.key) for s in fresh if s.kept]
        self.running = sorted(decoding + followers + prompts + fresh, key=lambda s: s.row)
        new, cached, budget = [], [s.cached for s in self.running], self.prefill_tokens
        for i, s in enumerate(self.running):
            decodes = i < len(decoding) + len(followers)
            end = s.cached + (1 if decodes else budget)
            if self.recurrent and s.cached < len(s.context) - 1:
                end = min(end, len(s.context) - 1)
            new.append(s.context[s.cached : end])
            budget -= 0 if decodes else len(new[-1])
            s.cached += len(new[-1])
        sampled = [i for i, s in enumerate(self.running) if s.cached == len(s.context)]
        return Step(shape, copies, new, cached, sampled, self.running, restored)

    def _grow(self) -> tuple[int, int] | None:
        """Makes rows longer if a sequence has filled its own. If there are too few rows then, the shortest sequences
        wait."""
        needed = max((len(s.context) for s in self.running), default=0)
        if needed <= self.length:
            return None
        self.length = min(self.longest, max(needed, 2 * self.length))
        self.rows = min(self.rows, self.cache_tokens // self.length)
        kept = sorted(self.running, key=lambda s: (-len(s.context), s.index))[: self.rows]
        back = [s for s in self.running if s not in kept]
        for s in back:
            s.cached, s.row = 0, -1
        self.running = [s for s in self.running if s in kept]
        self.waiting = sorted(back, key=lambda s: s.index) + self.waiting
        return self.rows, self.length

    def _admit(self, budget: int) -> tuple[list[ActiveRequest], list[ActiveRequest]]:
        """Admits waiting sequences: those with a prompt in the cache, and those within `budget` prompt tokens in
        all."""
        followers: list[ActiveRequest] = []
        fresh: list[ActiveRequest] = []
        kept: list[ActiveRequest] = []
        free = self.rows - len(self.running)
        for s in self.waiting if free else ():
            begun = len(s.context) > len(s.prompt) or s.kept > 0
            leader = None if begun else self._leaders.get(s.prompt)
            if self.recurrent and leader is not None and leader.cached > len(s.prompt) - 1:
                leader = None
            if len(followers) + len(fresh) == free:
                kept.append(s)
            elif leader is not None and leader is not s and not leader.done:
                ready = leader.cached >= len(s.prompt) - 1  # else wait: a later step feeds the rest of the prompt
                (followers if ready else kept).append(s)
            elif budget > 0:
                if not begun:
                    self._leaders[s.prompt] = s
                fresh.append(s)
                s.cached = s.kept
                budget -= len(s.context) - s.kept
            else:
                kept.append(s)
        if free:
            self.waiting = kept
        return followers, fresh

    def _place(
        self, decoding: list[ActiveRequest], followers: list[ActiveRequest], prompts: list[ActiveRequest]
    ) -> list[tuple[int, int, int]]:
        """Gives every sequence its row. Those with one new token get the first rows, and stay in theirs if they can."""
        count, copies = len(decoding) + len(followers), []

        def move(s: ActiveRequest, row: int) -> None:
            copies.append((s.row, row, s.cached))
            s.row = row

        begun = [s for s in prompts if s.row >= 0]  # above all decoding ones
        for s in begun:
            if s.row < count:
                move(s, count)
        holes = iter(sorted(set(range(count)) - {s.row for s in decoding}))
        for s in decoding:
            if s.row >= count:
                move(s, next(holes))
        for s in followers:
            s.row, s.cached = next(holes), len(s.prompt) - 1
            copies.append((self._leaders[s.prompt].row, s.row, s.cached))
        for s in begun:
            if s.row > count:
                move(s, count)
        for i, s in enumerate(prompts):
            s.row = count + i
        return [copy for copy in copies if copy[2]]

    def take(self, step: Step, tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        """Adds the tokens that were chosen for the sampled sequences of `step`, in their order."""
        for i, token, log_prob in zip(step.sampled, tokens, log_probs, strict=True):
            step.sequences[i].add(token, log_prob)
        self.running = [s for s in step.sequences if not s.done]

    @property
    def completed(self) -> int:
        """Returns the number of requests with a whole completion."""
        return len(self.sequences) - len(self.waiting) - len(self.running)

    def completions(self) -> list[tuple[int, Completion]]:
        return [(s.index, Completion(s.tokens, s.log_probs, s.finished)) for s in self.sequences]
