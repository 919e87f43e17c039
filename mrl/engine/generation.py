"""Schedules continuous batching: the tokens of each sequence that a forward of a generation takes.

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
import functools
import itertools
import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mrl.engine.kept import KeptSequences
from mrl.engine.requests import ActiveRequest, Completion, GenerateRequest
from mrl.engine.sampling import SamplingKey, SamplingParams, SamplingRows, key_hash, noise_keys
from mrl.engine.splitmix import to_int64
from mrl.errors import ConfigError
from mrl.ops.devices import HostCopy, tensor_on

FIRST_NEW_TOKENS = 256
"""New tokens in a row at first, if there is not enough memory for the longest completions of all requests."""


@dataclasses.dataclass(frozen=True)
class Step:
    """Describes one forward. Row `i` of the cache belongs to sequence `i`."""

    shape: tuple[int, int] | None
    """(rows, positions of a row) of the cache from this forward on; None if it stays."""
    copies: list[tuple[int, int, int]]
    """(source row, target row, positions), in order, before the new shape and the forward."""
    tokens: list[int]  # new ones, those of each sequence after another; 0 for one that is not read yet
    lengths: list[int]  # how many new tokens each sequence has
    cached: list[int]  # how many tokens of each sequence are in the cache
    sampled: Sequence[int]  # the sequences that get their next token from this forward
    sequences: list[ActiveRequest]
    restored: list[tuple[int, SamplingKey]] = dataclasses.field(default_factory=list)
    """(row, key) of sequences with kept keys and values to put back into their rows (`KeptSequences.restore`)."""
    unread: tuple[Sequence[int], Sequence[int]] = ((), ())
    """Indices of `tokens` that are not read yet, and theirs among the sampled sequences of the step before."""
    like: "Step | None" = None  # an earlier step with the same sequences, each with one token
    made: list[tuple[Tensor, SamplingRows]] = dataclasses.field(default_factory=list)
    """What steps that are alike share, once it is made: the first one's hashes plus positions, and its rows."""
    ending: Sequence[ActiveRequest] = ()  # sequences whose longest completion ends with this step's token

    @property
    def new(self) -> list[list[int]]:
        """Returns the tokens of each sequence."""
        ends = list(itertools.accumulate(self.lengths))
        return [self.tokens[end - count : end] for end, count in zip(ends, self.lengths, strict=True)]

    @property
    def decoding(self) -> int:
        """Returns how many leading sequences have one new token."""
        if len(self.tokens) == len(self.lengths):
            return len(self.lengths)
        return next(i for i, count in enumerate(self.lengths) if count != 1)

    @property
    def last(self) -> list[int]:
        """Returns the index of each sampled sequence's last token among all new ones."""
        ends = list(itertools.accumulate(self.lengths))
        return [ends[i] - 1 for i in self.sampled]

    def part(self, first: int, end: int) -> "Step":
        """Returns the step of the sequences from `first` up to `end`, where `first` begins at row 0 of its cache."""
        start = sum(self.lengths[:first])
        tokens = self.tokens[start : start + sum(self.lengths[first:end])]
        sampled = [i - first for i in self.sampled if first <= i < end]
        # those that are not read yet decode, and come first
        unread = self.unread if first == 0 else ((), ())
        rest = self.sequences[first:end]
        return Step(None, [], tokens, self.lengths[first:end], self.cached[first:end], sampled, rest, unread=unread)

    def token_ids(self, device: torch.device, before: Tensor | None, padding: int = 0) -> Tensor:
        """Returns the new tokens, and zeros behind them. before: what the step before has chosen, [S] int64."""
        count, (places, sources) = len(self.tokens), self.unread
        if before is not None and not padding and len(places) == count:
            return before if sources == range(len(before)) else before[tensor_on(device, sources)]
        ids = tensor_on(device, self.tokens + [0] * padding)
        if len(places):
            assert before is not None
            ids[tensor_on(device, places)] = before[tensor_on(device, sources)]
        return ids

    def sampling(self, device: torch.device) -> SamplingRows:
        """Returns the parameters of the sampled sequences. They are made once for steps that are alike."""
        first = self if self.like is None else self.like
        if first.made:  # all positions are as many after those of the first step
            [(starts, rows)] = first.made
            return rows.with_keys(noise_keys(starts, [self.cached[0] - first.cached[0]]))
        chosen = [self.sequences[i] for i in self.sampled]
        # int64 wraps around, so positions may be added to hashes here and the steps after them later
        starts = torch.tensor([s.key_hash for s in chosen])
        starts += torch.tensor([self.cached[i] + self.lengths[i] for i in self.sampled])
        rows = SamplingRows.of([s.sampling for s in chosen], noise_keys(starts, [0]), device)
        first.made.append((starts, rows))
        return rows


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


DUMMY = Step(None, [], [0], [1], [0], [], [])
"""A forward of one token, for a rank without requests while others need it in their forward."""


class Schedule:
    """Plans the steps of one generation over `requests`, each with its index in the caller's list.

    cache_tokens: tokens whose keys and values are kept at once. `rows` times `length` is never more. prefill_tokens:
    the most prompt tokens of one forward. kept: what earlier calls have kept of these sequences. recurrent: the cache
    holds states, which cannot go back to an earlier token. So a prompt is fed without its last token first, and copied
    before that one is fed. late: tokens of a step are read after the next one has been planned and begun. A sequence
    that has ended meanwhile is fed once more, and its next token is dropped.
    """

    def __init__(
        self,
        requests: Sequence[tuple[int, GenerateRequest]],
        *,
        cache_tokens: int,
        prefill_tokens: int,
        kept: KeptSequences | None = None,
        recurrent: bool = False,
        late: bool = False,
    ) -> None:
        self.recurrent, self.late = recurrent, late
        kinds: dict[SamplingParams, SamplingParams] = {}  # equal ones are one object: steps compare them
        self.sequences = [
            ActiveRequest(
                r, i, tuple(r.tokens), list(r.tokens), to_int64(key_hash(r.key)), len(r.tokens),
                kinds.setdefault(r.sampling, r.sampling),
            )
            for i, r in requests
        ]  # fmt: skip
        self._stops = set[int]().union(*(r.stop_tokens for _, r in requests))
        self._asks = any(r.stop_at is not None for _, r in requests)
        if kept is not None:
            kept.begin([r for _, r in requests], recurrent=recurrent)
            for s in self.sequences:
                s.kept = kept.length(s.request.key)
        self.waiting = [s for s in self.sequences if not s.done]
        self.running: list[ActiveRequest] = []
        self.completed = len(self.sequences) - len(self.waiting)  # requests with a whole completion
        self._gone: list[ActiveRequest] = []
        self._last: Step | None = None  # the step before, if the next may be like it
        self._alike = 0  # how many steps like it may follow
        self.cache_tokens, self.prefill_tokens = cache_tokens, prefill_tokens
        count = max(1, len(self.waiting))
        self.longest = max([s.most for s in self.waiting], default=1)
        start = max([len(s.prompt) for s in self.waiting], default=0) + FIRST_NEW_TOKENS
        self.length = min(self.longest, max(start, cache_tokens // count), cache_tokens)
        self.rows = min(count, cache_tokens // self.length)
        self._leaders: dict[tuple[int, ...], ActiveRequest] = {}

    @property
    def done(self) -> bool:
        return not self.waiting and not self.running

    def next(self) -> Step:
        """Returns the step to make now. Call `take` with its tokens before the next, or, if `late`, after it."""
        if self._last is not None and self._alike and (not self.waiting or len(self.running) == self.rows):
            return self._next_like(self._last)
        shape = self._grow()
        # loops over all sequences take most of the host's time of a step, so they do little
        prompts = [s for s in self.running[-1:] if s.cached < s.length - 1]  # at most one, in the highest row
        decoding = self.running[: len(self.running) - len(prompts)]
        followers, fresh = self._admit(self.prefill_tokens - sum(s.length - s.cached for s in prompts))
        copies = self._place(decoding, followers, prompts + fresh)
        restored = [(s.row, s.request.key) for s in fresh if s.kept]
        self.running = sorted(decoding + followers + prompts + fresh, key=operator.attrgetter("row"))
        count, cached = len(decoding) + len(followers), [s.cached for s in self.running]
        leading = self.running[:count]
        places = [i for i, s in enumerate(leading) if s.cached == len(s.context)]
        unread = places, [leading[i].place for i in places]
        tokens = [0 if s.cached == len(s.context) else s.context[s.cached] for s in leading]
        lengths, sampled, budget = [1] * count, list(range(count)), self.prefill_tokens
        for i, s in enumerate(leading):
            s.place, s.cached = i, s.length
            s.length += 1
        for i, s in enumerate(self.running[count:], start=count):
            end = min(s.length, s.cached + budget)
            if self.recurrent and s.cached < s.length - 1:
                end = min(end, s.length - 1)
            tokens += s.context[s.cached : end]
            lengths.append(end - s.cached)
            budget -= lengths[-1]
            s.cached = end
            if end == s.length:
                s.place = len(sampled)
                sampled.append(i)
                s.length += 1
        ending = [s for s in self.running if s.length >= s.most]
        step = Step(shape, copies, tokens, lengths, cached, sampled, self.running, restored, unread, ending=ending)
        if ending:
            self._gone += ending
            self.running = [s for s in self.running if s.length < s.most]
        self._last = step if len(self.running) == len(sampled) == len(tokens) else None
        if self._last is not None:
            until_done = min(s.most - s.length for s in self.running)
            self._alike = min(until_done - 1, self.length + 1 - max(s.length for s in self.running))
        return step

    def _next_like(self, last: Step) -> Step:
        """Returns the next step if sequences and rows are those of the last one."""
        known = not self.late
        tokens = [s.context[-1] for s in self.running] if known else last.tokens
        places = range(0 if known else len(tokens))
        for s in self.running:
            s.cached += 1
            s.length += 1
        self._alike -= 1
        self._last = Step(
            None, [], tokens, last.lengths, [count + 1 for count in last.cached], last.sampled, self.running,
            unread=(places, places), like=last if last.like is None else last.like,
        )  # fmt: skip
        return self._last

    def _grow(self) -> tuple[int, int] | None:
        """Makes rows longer if a sequence has filled its own. If there are too few rows then, the shortest sequences
        wait."""
        needed = max(map(operator.attrgetter("length"), self.running), default=0)
        if needed <= self.length:
            return None
        self.length = min(self.longest, max(needed, 2 * self.length))
        self.rows = min(self.rows, self.cache_tokens // self.length)
        kept = sorted(self.running, key=lambda s: (-s.length, s.index))[: self.rows]
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
        for i, s in enumerate(self.waiting):
            if len(followers) + len(fresh) == free:
                kept += self.waiting[i:]
                break
            begun = s.length > len(s.prompt) or s.kept > 0
            leader = None if begun else self._leaders.get(s.prompt)
            if self.recurrent and leader is not None and leader.cached > len(s.prompt) - 1:
                leader = None
            if leader is not None and leader is not s and not leader.done:
                ready = leader.cached >= len(s.prompt) - 1  # else wait: a later step feeds the rest of the prompt
                (followers if ready else kept).append(s)
            elif budget > 0:
                if not begun:
                    self._leaders[s.prompt] = s
                fresh.append(s)
                s.cached = s.kept
                budget -= s.length - s.kept
            else:
                kept.append(s)
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
        chosen = [step.sequences[i] for i in step.sampled]
        for s, token, log_prob in zip(chosen, tokens, log_probs, strict=True):
            if not s.finished:
                s.context.append(token)
                s.log_probs.append(log_prob)
        asked = chosen if self._asks else [s for s, t in zip(chosen, tokens, strict=True) if t in self._stops]
        stopped = [s for s in asked if not s.finished and s.stops()]
        self.completed += len(stopped) + sum(not s.finished for s in step.ending)
        if stopped:
            self._gone += [s for s in self.running if s.finished]
            self.running = [s for s in self.running if not s.finished]
            if any(s.row < 0 for s in stopped):  # it has lost its row meanwhile
                self.waiting = [s for s in self.waiting if not s.finished]
            self._last = None

    def gone(self) -> list[ActiveRequest]:
        """Returns the sequences that are fed no more since the last call, in the order of their rows, which are still
        theirs."""
        gone, self._gone = sorted(self._gone, key=lambda s: s.row), []
        return gone

    def completions(self) -> list[tuple[int, Completion]]:
        return [(s.index, Completion(s.tokens, s.log_probs, s.finished)) for s in self.sequences]


class SampledTokens:
    """Holds the tokens that a step has chosen, on the device and on their way to the host.

    parts: results [3, S] fp64 on the device, in the order of the sampled sequences: tokens, which are exact in fp64,
    their log-probs, and 1 if they hold or 0 if the choice needs more candidates. more: for each part, its result from
    more candidates.
    """

    def __init__(self, parts: list[Tensor], more: Sequence[Callable[[], Tensor]]) -> None:
        self._parts, self._more = parts, more
        self._copy()

    def _copy(self) -> None:
        self._result = self._parts[0] if len(self._parts) == 1 else torch.cat(self._parts, dim=1)
        self._host = HostCopy(self._result)

    @functools.cached_property
    def tokens(self) -> Tensor:
        """Returns [S] int64 on the device. They hold if no request filters by top_p."""
        return self._result[0].long()

    def read(self) -> tuple[list[int], list[float]]:
        """Returns tokens and log-probs. The host waits for the step here, and nowhere else."""
        while True:
            tokens, log_probs, exact = self._host.tolist()
            if all(exact):
                return list(map(int, tokens)), log_probs
            start = 0
            for i, part in enumerate(self._parts):
                end = start + part.shape[1]
                if not all(exact[start:end]):
                    self._parts[i] = self._more[i]()
                start = end
            self._copy()


def may_read_late(requests: Sequence[GenerateRequest], device: torch.device) -> bool:
    """Returns whether the host reads a step's tokens while the device runs the next step. Tokens under top_p may need
    a second look. A CPU gains nothing, and numbers of rows change its rounding."""
    return device.type == "cuda" and all(r.sampling.greedy or r.sampling.top_p == 1 for r in requests)


def complete(
    schedule: Schedule,
    launch: Callable[[Step, Tensor | None], SampledTokens],
    *,
    any_has_work: Callable[[bool], bool],
    keep: Callable[[list[ActiveRequest]], None],
    progress: Callable[[int], None],
) -> dict[int, Completion]:
    """Returns the completions of a schedule by index.

    launch: begins a step, given what the step before has chosen. any_has_work: whether a rank that steps with this one
    has work, from whether this one has. keep: gets the sequences that are fed no more while their rows are whole.
    progress: gets the number of whole completions.
    """
    before: tuple[Step, SampledTokens] | None = None
    while any_has_work(not schedule.done):
        step = DUMMY if schedule.done else schedule.next()
        now = step, launch(step, None if before is None else before[1].tokens)
        read, before = (before, now) if schedule.late else (now, None)
        if read is not None:
            schedule.take(read[0], *read[1].read())
        keep(schedule.gone())
        progress(schedule.completed)
    if before is not None:
        schedule.take(before[0], *before[1].read())
        progress(schedule.completed)
    return dict(schedule.completions())
