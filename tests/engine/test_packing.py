"""Best-fit packing: complete, within capacity, deterministic, equal to the naive rule, and fast."""

import random
import time

from hypothesis import given
from hypothesis import strategies as st

from mrl.engine.microbatch import best_fit_decreasing


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
