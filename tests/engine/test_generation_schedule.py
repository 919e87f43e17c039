"""Continuous batching without a model: a toy whose next token is a hash of the whole context, and a cache of tokens.

`late` steps are planned before the tokens of the step before are read. Every step the toy's cache must hold, in each row, just the context of the sequence that the step says is there: so rows
that move, are copied from another with the same prompt, or are fed in pieces are right, or the hash is not.
"""

import random
import types

import pytest

from mrl.engine import generation
from mrl.engine.base import Completion, GenerateRequest
from mrl.engine.generation import Schedule, check_room
from mrl.engine.kept import KeptSequences, share
from mrl.engine.sampling import SamplingKey
from mrl.errors import ConfigError


def next_token(context):
    return hash(tuple(context)) % 50 + 3


def alone(request):
    """What a request gives with nothing else around."""
    new, finished = [], False
    while len(new) < request.max_new_tokens and not finished:
        new.append(next_token([*request.tokens, *new]))
        finished = new[-1] in request.stop_tokens or (request.stop_at is not None and request.stop_at(new))
    return Completion(new, [float(t) for t in new], finished)


class Cache(list):
    """Rows of tokens, with the methods of KVCache that copy them out and in."""

    recurrent = False  # a row stands for all of its tokens, and for no part of them

    def copy_row(self, row, places):
        assert len(self[row]) == places
        return self[row][:places]

    def put_row(self, row, copy, places):
        assert len(copy) == places or not self.recurrent
        self[row] = list(copy[:places])


class Toy:
    """Runs steps over rows of tokens. A step's tokens are known to the host when it reads them, and to the next step."""

    def __init__(self, schedule, kept, prefill_tokens):
        self.schedule, self.kept, self.prefill_tokens = schedule, kept, prefill_tokens
        self.cache = Cache([] for _ in range(schedule.rows))
        self.cache.recurrent = schedule.recurrent
        self.steps, self.done, self.reads = [], [0], []

    def launch(self, step, before):
        cache, schedule, recurrent = self.cache, self.schedule, self.schedule.recurrent
        for source, target, places in step.copies:
            assert source != target and len(cache[source]) >= places
            assert len(cache[source]) == places or not recurrent
            cache[target] = cache[source][:places]
        if step.shape is not None:
            assert step.shape[0] <= len(cache)
            del cache[step.shape[0] :]
        if self.kept is not None:
            self.kept.restore(step.restored, cache)
        assert len(cache) == schedule.rows and schedule.rows * schedule.length <= max(schedule.cache_tokens, 1)
        assert 1 <= len(step.new) <= schedule.rows and all(step.new)
        assert schedule.late or not step.unread[0]
        for place, source in zip(*step.unread, strict=True):
            step.tokens[place] = before[source]
        assert sum(step.lengths[step.decoding :]) <= self.prefill_tokens
        for row, (new, old) in enumerate(zip(step.new, step.cached, strict=True)):
            assert old in (0, len(cache[row])) or not recurrent
            cache[row] = cache[row][:old] + new
            assert len(cache[row]) == old + len(new) <= schedule.length
            without_last = recurrent and old + len(new) == len(step.sequences[row].context) - 1
            assert row in step.sampled or without_last or row == len(step.new) - 1, (
                "only the last prompt is fed in part"
            )
        self.steps.append(step)
        chosen = [next_token(cache[row]) for row in step.sampled]

        def read():
            self.reads.append(len(self.steps))
            return chosen, [float(t) for t in chosen]

        return types.SimpleNamespace(tokens=chosen, read=read)

    def keep(self, gone):
        if self.kept is not None:
            self.kept.keep(gone, [self.cache])
            assert self.kept.tokens <= self.kept.room

    def progress(self, done):
        assert self.done[-1] <= done <= len(self.schedule.sequences)
        self.done.append(done)


def complete(requests, *, cache_tokens, prefill_tokens, kept=None, recurrent=False, late=False):
    """(completions, steps) of a schedule over the toy."""
    limits = {"cache_tokens": cache_tokens, "prefill_tokens": prefill_tokens}
    schedule = Schedule(list(enumerate(requests)), **limits, kept=kept, recurrent=recurrent, late=late)
    toy = Toy(schedule, kept, prefill_tokens)
    done = generation.complete(schedule, toy.launch, any_has_work=bool, keep=toy.keep, progress=toy.progress)
    assert schedule.completed == toy.done[-1] == len(requests) or not toy.steps
    steps = len(toy.steps)
    assert toy.reads == (([*range(2, steps + 1), steps] if late else [*range(1, steps + 1)]) if steps else [])
    return [done[i] for i in range(len(requests))], toy.steps


def requests(numbers, count):
    prompts = [[numbers.randrange(50) for _ in range(numbers.randint(1, 9))] for _ in range(max(1, count // 3))]
    stops = [(), (5, 6, 7, 8, 9, 10, 11)]
    return [
        GenerateRequest(numbers.choice(prompts) + [i] * (i % 2), numbers.randint(0, 8), numbers.choice(stops))
        for i in range(count)
    ]


@pytest.mark.parametrize(("first", "recurrent"), [(1, False), (4, False), (256, False), (4, True)])
@pytest.mark.parametrize("late", [False, True])
def test_every_sequence_is_as_alone(monkeypatch, first, recurrent, late):
    monkeypatch.setattr(generation, "FIRST_NEW_TOKENS", first)
    for seed in range(150):
        numbers = random.Random(seed)
        limits = {"cache_tokens": numbers.choice((18, 40, 1000)), "prefill_tokens": numbers.choice((1, 3, 100))}
        wanted = requests(numbers, numbers.randint(0, 14))
        done, _ = complete(wanted, **limits, recurrent=recurrent, late=late)
        assert done == [alone(request) for request in wanted]


def fed(steps):
    return sum(len(new) for step in steps for new in step.new)


@pytest.mark.parametrize("recurrent", [False, True])
def test_samples_of_a_prompt_share_it(recurrent):
    """All but its last token, which each feeds."""
    wanted = [GenerateRequest([*range(9)], 3)] * 5
    done, steps = complete(wanted, cache_tokens=100, prefill_tokens=100, recurrent=recurrent)
    assert done == [alone(wanted[0])] * 5 and fed(steps) == 8 + 5 * (1 + 2)


@pytest.mark.parametrize(
    ("room", "recurrent", "late"),
    [(0, False, True), (20, True, True), (20, False, False), (1000, False, True), (1000, True, False)],
)
def test_conversations_go_on_with_what_is_kept(monkeypatch, room, recurrent, late):
    """Random conversations: those that go on, end, or change what was said before, are as without anything kept."""
    with_kept, without, restored = 0, 0, 0
    for seed in range(20):
        numbers, kept = random.Random(seed), KeptSequences(room)
        cache_tokens, prefill_tokens, first = ((60, 3, 4), (200, 100, 256))[seed % 2]
        monkeypatch.setattr(generation, "FIRST_NEW_TOKENS", first)
        key = lambda i: SamplingKey(sample=i)  # noqa: E731
        live = {i: [numbers.randrange(50) for _ in range(numbers.choice((1, 5)))] for i in range(numbers.randint(1, 8))}
        while live:
            wanted = [GenerateRequest(t, numbers.randint(1, 6), (5, 6, 7), key=key(i)) for i, t in live.items()]
            limits = {"cache_tokens": cache_tokens, "prefill_tokens": prefill_tokens, "recurrent": recurrent}
            limits["late"] = late
            (done, steps), (_, plain) = complete(wanted, **limits, kept=kept), complete(wanted, **limits)
            assert done == [alone(request) for request in wanted]
            with_kept, without = with_kept + fed(steps), without + fed(plain)
            restored += sum(len(step.restored) for step in steps)
            for i, completion in zip(list(live), done, strict=True):
                live[i] = [*live[i], *completion.tokens, *[numbers.randrange(50)] * numbers.choice((0, 1, 4))]
                if len(live[i]) > 40 or numbers.random() < 0.2:
                    del live[i]
                elif numbers.random() < 0.1:
                    live[i][numbers.randrange(len(live[i]))] += 1
    assert (restored > 0) == (room > 0)
    assert with_kept < 0.5 * without if room == 1000 else with_kept <= without


def test_what_stays_the_same_is_kept_where_a_turn_loses_a_part():
    """As under a chat template that drops the thinking of earlier turns."""
    kept, limits = KeptSequences(100), {"cache_tokens": 100, "prefill_tokens": 100}
    (done,), _ = complete([GenerateRequest([1, 2, 3, 4], 4)], **limits, kept=kept)
    again = GenerateRequest([1, 2, 3, 4, *done.tokens[2:], 9], 1)
    assert again.tokens[4] != done.tokens[0], "so that four tokens stay the same"
    answer, steps = complete([again], **limits, kept=kept)
    assert answer == [alone(again)] and fed(steps) == len(again.tokens) - 4


def test_two_requests_of_one_key_go_on_with_nothing():
    """As two clients that sample one prompt with one seed, at temperatures that draw other tokens."""
    kept, limits = KeptSequences(100), {"cache_tokens": 100, "prefill_tokens": 100}
    wanted = [GenerateRequest([1, 2, i, 4], 3) for i in (7, 8)]
    for _ in range(3):
        done, steps = complete(wanted, **limits, kept=kept)
        assert done == [alone(request) for request in wanted]
        assert not any(step.restored for step in steps)
        wanted = [GenerateRequest([*r.tokens, *one.tokens], 3) for r, one in zip(wanted, done, strict=True)]
    done, steps = complete(wanted[1:], **limits, kept=kept)
    assert done == [alone(wanted[1])] and sum(len(step.restored) for step in steps) == 1


def test_what_has_no_room_any_more_is_forgotten():
    """Of conversations, and of which replica had them: else those of a long run would be many."""
    kept, limits = KeptSequences(100), {"cache_tokens": 100, "prefill_tokens": 100}
    wanted = [GenerateRequest([1, 2, 3], 4, key=SamplingKey(sample=i)) for i in range(4)]
    complete(wanted, **limits, kept=kept)
    assert kept.tokens == 4 * 6
    kept.shrink(13)
    assert kept.tokens == 12 and kept.room == 13
    kept.share(wanted, 0, 2)
    kept.share(wanted[:1], 0, 2)
    assert len(kept._replicas) == 1


def test_a_conversation_stays_with_its_replica():
    def wanted(*samples):
        return [GenerateRequest([1], 1, key=SamplingKey(sample=i)) for i in samples]

    for room in (0, 9):
        kept = KeptSequences(room)
        assert [kept.share(wanted(*range(8)), part, 2) for part in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        later = [kept.share(wanted(3, 4, 5, 6), part, 2) for part in (0, 1)]
        assert later == ([[0], [1, 2, 3]] if room else [[0, 1], [2, 3]])


def test_a_finished_sequence_makes_room_at_once():
    """Four rows, twelve requests of very unequal length: as many steps as the work needs, not as groups would take."""
    lengths = [20, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 20]
    wanted = [GenerateRequest([i, 50 + i], n) for i, n in enumerate(lengths)]
    done, steps = complete(wanted, cache_tokens=4 * 22, prefill_tokens=100)
    assert [len(c.tokens) for c in done] == lengths
    assert len(steps) == 20 + 3  # the last one starts after three rounds of short ones
    assert max(len(step.new) for step in steps) == 4


def test_rows_grow_and_the_shortest_wait(monkeypatch):
    """Room for four short rows, then for two, then for one. Three of the prompts end early, the others go to their limit."""
    monkeypatch.setattr(generation, "FIRST_NEW_TOKENS", 4)
    early = {"stop_at": lambda new: len(new) == 3}
    wanted = [GenerateRequest([5], 20), GenerateRequest([6], 20, **early), GenerateRequest([7], 20, **early)]
    wanted += [GenerateRequest([8], 20), GenerateRequest([8], 20), GenerateRequest([9], 20, **early)]
    done, steps = complete(wanted, cache_tokens=21, prefill_tokens=9)
    assert done == [alone(request) for request in wanted]
    assert [step.shape for step in steps if step.shape] == [(2, 10), (1, 20)]
    assert max(len(step.new) for step in steps) == 4


def test_a_request_that_cannot_fit_names_the_value():
    check_room([GenerateRequest([1, 2], 3)], 5)
    with pytest.raises(ConfigError, match="cache_tokens: value 4 is less than the 5 tokens of request 1 .*at least 5"):
        check_room([GenerateRequest([1], 3), GenerateRequest([1, 2], 3)], 4)


@pytest.mark.parametrize(("count", "parts"), [(0, 3), (2, 3), (7, 3), (9, 3), (5, 1)])
def test_shares_are_a_partition(count, parts):
    shares = [share(count, part, parts) for part in range(parts)]
    assert [i for one in shares for i in one] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
