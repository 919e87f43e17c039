"""Cutting a mini-batch: every sequence once, limits kept, counts equal, tokens balanced, for any lengths.

Best-fit packing: complete, within capacity, deterministic, equal to the naive rule, and fast.
"""

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.engine.microbatch import (
    balanced_shards,
    best_fit_decreasing,
    plan_micro_batches,
    shares,
    split_micro_batches,
    split_to_count,
    token_budget,
)
from mrl.errors import ConfigError


def naive(lengths, capacity):
    """The rule as one writes it down: O(n * bins). Ties: the bin that was filled last."""
    bins, free, filled = [], [], []
    for clock, i in enumerate(sorted(range(len(lengths)), key=lambda i: -lengths[i])):
        fits = [b for b in range(len(bins)) if free[b] >= lengths[i]]
        if fits:
            b = min(fits, key=lambda b: (free[b], -filled[b]))
        else:
            b = len(bins)
            bins.append([]), free.append(capacity), filled.append(clock)
        bins[b].append(i)
        free[b] -= lengths[i]
        filled[b] = clock
    return bins


@given(st.lists(st.integers(0, 3000), max_size=60), st.integers(3000, 5000))
def test_equals_the_naive_rule(lengths, capacity):
    bins = best_fit_decreasing(lengths, capacity)
    assert bins == naive(lengths, capacity)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in b) <= capacity for b in bins)


def test_fills_gaps_that_first_fit_leaves():
    assert best_fit_decreasing([6, 5, 4, 3, 2], 10) == [[0, 2], [1, 3, 4]]


def test_a_hundred_thousand_lengths_take_seconds_at_most_and_pack_tightly():
    capacity = 4096
    rng = random.Random(0)
    lengths = [min(capacity, int(rng.lognormvariate(6, 1)) + 1) for _ in range(100_000)]
    start = time.process_time()
    bins = best_fit_decreasing(lengths, capacity)
    assert time.process_time() - start < 5  # about 0.3 s; quadratic code takes minutes
    assert sum(lengths) / (len(bins) * capacity) > 0.98


lengths_lists = st.lists(st.integers(1, 64), max_size=40)
limits = st.one_of(st.builds(dict, tokens=st.integers(64, 256)), st.builds(dict, size=st.integers(1, 8)))


def cost(lengths, indices, packed):
    sizes = [lengths[i] for i in indices]
    return 0 if not sizes else sum(sizes) if packed else len(sizes) * max(sizes)


def assert_partition(parts, n):
    assert sorted(i for part in parts for i in part) == list(range(n))


@given(lengths_lists, st.integers(1, 9))
def test_shards_have_every_sequence_once_and_equal_counts_and_are_balanced(lengths, n):
    shards = balanced_shards(lengths, n)
    assert len(shards) == n
    assert_partition(shards, len(lengths))
    counts, sums = [len(s) for s in shards], [sum(lengths[i] for i in s) for s in shards]
    assert max(counts) - min(counts) <= 1 and max(sums) - min(sums) <= max(lengths, default=0)
    assert all(s == sorted(s) for s in shards)
    assert shares(lengths, n) == shares(lengths, n, 1) == shards


def test_shards_are_nearly_even_on_many_sequences():
    rng = random.Random(0)
    lengths = [rng.randint(16, 2048) for _ in range(256)]
    sums = [sum(lengths[i] for i in s) for s in balanced_shards(lengths, 8)]
    assert max(sums) / min(sums) < 1.001


def test_equal_lengths_and_one_rank_keep_a_simple_order():
    assert balanced_shards([7, 3, 9], 1) == [[0, 1, 2]]
    assert [s[0] for s in balanced_shards([5, 5, 5, 5], 4)] == [0, 1, 2, 3]


@given(lengths_lists, limits, st.integers(0, 60), st.booleans())
def test_count_is_exact_and_limits_are_kept(lengths, limit, extra, packed):
    least = split_micro_batches(lengths, **limit, packed=packed)
    parts = split_to_count(lengths, len(least) + extra, **limit, packed=packed)
    for found in (least, parts):
        assert_partition(found, len(lengths))
        assert all(cost(lengths, part, packed) <= limit.get("tokens", 10**9) for part in found)
        assert all(len(part) <= limit.get("size", len(part)) for part in found)
    assert all(least) and ("tokens" in limit or len(least) == -(-len(lengths) // limit["size"])), "the fewest"
    assert len(parts) == len(least) + extra
    assert sum(1 for part in parts if part) == min(len(parts), len(lengths))


@given(st.lists(lengths_lists, min_size=1, max_size=5), st.integers(1, 4))
def test_ranks_run_the_same_number_of_micro_batches(ranks, multiple_of):
    largest = max(len(split_micro_batches(lengths, tokens=100, packed=True)) for lengths in ranks)
    plans = [
        plan_micro_batches(lengths, tokens=100, packed=True, multiple_of=multiple_of, agree=lambda n: largest)
        for lengths in ranks
    ]
    assert len({len(plan) for plan in plans}) == 1
    assert len(plans[0]) % multiple_of == 0 and len(plans[0]) >= 1


def test_a_rank_without_sequences_still_has_micro_batches():
    assert plan_micro_batches([], tokens=8, packed=True, agree=lambda n: 3) == [[], [], []]
    assert plan_micro_batches([], size=2, packed=False) == [[]]


def test_a_sequence_over_the_budget_names_the_key():
    assert [token_budget(8, 9, trains=trains) for trains in (True, False)] == [8, 9]
    assert [token_budget(None, longest, trains=True) for longest in (9, 5000)] == [4096, 5000]
    with pytest.raises(ConfigError, match=r"engine.micro_batch.tokens: value 8 is less than a sequence of 9 tokens"):
        split_micro_batches([3, 9], tokens=8, packed=True)


@pytest.mark.parametrize("given_limits", [{}, {"size": 2, "tokens": 8}])
def test_exactly_one_limit(given_limits):
    with pytest.raises(ConfigError, match="exactly one"):
        split_micro_batches([3], packed=True, **given_limits)
