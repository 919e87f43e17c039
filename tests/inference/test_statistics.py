"""Estimates, intervals and tests against what defines them: counts of all subsets and signs, formulas and tables."""

from __future__ import annotations

import itertools
import math
import random
from statistics import fmean

import pytest

from mrl.inference import statistics


@pytest.mark.parametrize("values", [[1, 0, 0, 1, 0], [0, 0, 0], [1, 1], [0.5, 0.25, 1.0, 0.0]])
def test_pass_at_k_is_the_mean_over_all_subsets(values):
    for k in range(1, len(values) + 1):
        every = [max(subset) for subset in itertools.combinations(values, k)]
        assert statistics.pass_at_k(values, k) == pytest.approx(fmean(every), abs=1e-15)


def test_pass_at_k_is_the_formula_of_the_paper():
    """Chen et al. 2021, eq. 1; of 200 samples too, where a product of floats would lose digits."""
    for correct, samples, k in ((3, 10, 1), (3, 10, 4), (17, 200, 100), (199, 200, 2)):
        values = [1.0] * correct + [0.0] * (samples - correct)
        expected = 1 - math.comb(samples - correct, k) / math.comb(samples, k)
        assert statistics.pass_at_k(values, k) == pytest.approx(expected, abs=1e-12)


def test_students_quantiles_are_those_of_the_tables():
    table = {1: 12.7062, 2: 4.30265, 5: 2.57058, 10: 2.22814, 29: 2.04523, 100: 1.98397, 1000: 1.96234, 10**6: 1.95997}
    for freedom, t in table.items():
        assert statistics.t_quantile(0.975, freedom) == pytest.approx(t, abs=1e-4)
    assert statistics.student([1, 2, 3, 4, 5, 6]) == pytest.approx([3.5 - 1.96327, 3.5 + 1.96327], abs=1e-4)
    for freedom, t in ((1, 1.0), (3, -0.7), (4, 2.5), (9, 0.0)):  # against the density, integrated
        steps = 20_000
        low, width = -200.0, (t + 200) / steps
        density = math.gamma((freedom + 1) / 2) / math.sqrt(freedom * math.pi) / math.gamma(freedom / 2)
        area = sum((1 + (low + (i + 0.5) * width) ** 2 / freedom) ** (-(freedom + 1) / 2) for i in range(steps)) * width
        tail = 0.0 if freedom > 1 else math.atan(1 / 200) / math.pi  # what a density of t^-2 has below
        assert statistics.t_cdf(t, freedom) == pytest.approx(density * area + tail, abs=2e-4)


def test_wilsons_interval():
    assert statistics.wilson(0.8, 100) == pytest.approx(
        (0.71117, 0.86663), abs=1e-5
    )  # Brown et al. 2001's formula by hand
    assert statistics.wilson(0.0, 20)[0] == 0 and 0.1 < statistics.wilson(0.0, 20)[1] < 0.2
    assert statistics.wilson(1.0, 20)[1] == 1
    assert statistics.interval([1.0, 0.0, 0.0, 1.0, 0.0]) == statistics.wilson(0.4, 5), "of single answers, as they are"


@pytest.mark.parametrize("samples", [1, 4])
def test_intervals_cover(samples):
    """Of many evaluations of prompts that differ in difficulty, about 95 % cover the accuracy over all prompts."""
    rng, prompts, covered, runs = random.Random(0), 60, 0, 600
    for _ in range(runs):
        chances = [rng.betavariate(0.7, 0.5) for _ in range(prompts)]
        values_P = [fmean(float(rng.random() < chance) for _ in range(samples)) for chance in chances]
        low, high = statistics.interval(values_P)
        covered += low <= 0.7 / 1.2 <= high
    assert 0.92 <= covered / runs <= 0.98


def test_an_interval_covers_near_one():
    """Of 50 prompts, 3 % are answered half of the time and others nearly always, 4 samples each: Student's covers 87 %."""
    rng, covered, runs = random.Random(1), 0, 1000
    for _ in range(runs):
        chances = [0.5 if rng.random() < 0.03 else 0.995 for _ in range(50)]
        values_P = [fmean(float(rng.random() < chance) for _ in range(4)) for chance in chances]
        low, high = statistics.interval(values_P)
        covered += low <= 0.97 * 0.995 + 0.03 * 0.5 <= high
    assert covered / runs >= 0.92, covered / runs


def test_an_interval_of_shares_is_wilsons_of_its_effective_count():
    """Of pass@k's values, say: Franco et al. 2019, with Korn and Graubard's (z / t)^2; t of 4 degrees by the tables."""
    values, z, t = [0.5, 0.25, 1.0, 0.75, 0.0], 1.959964, 2.776445
    mean, squared_error = 0.5, 0.15625 / 5
    count = mean * (1 - mean) / squared_error * (z / t) ** 2
    centre, below = (mean + z * z / (2 * count)) / (1 + z * z / count), 1 + z * z / count
    half = z / below * math.sqrt(mean * (1 - mean) / count + z * z / (4 * count * count))
    assert statistics.interval(values) == pytest.approx((centre - half, centre + half), abs=1e-6)


def test_an_interval_of_equal_numbers_has_a_width():
    low, high = statistics.interval([0.5] * 10)
    assert low < 0.3 and high > 0.7
    assert statistics.interval([3.0, 5.0])[1] > 5, "numbers beyond 1 are not cut"
    assert statistics.student([0.2]) == statistics.interval([-1.0] * 40) == (-math.inf, math.inf)


def test_an_interval_of_equal_differences_has_a_width():
    """Of five prompts on which two models agree, not that they agree on all: McNemar's test would see nothing, either."""
    share = statistics.wilson(0.0, 5)[1]
    assert statistics.difference([0.0] * 5, bounded=True) == (-share, share) and 0.3 < share < 0.5
    assert statistics.difference([1.0] * 5, bounded=True) == (1 - 2 * share, 1)
    assert statistics.difference([0.0] * 5, bounded=False) == (-math.inf, math.inf)
    assert statistics.difference([1.0, 0.0, 0.5], bounded=False) == statistics.student([1.0, 0.0, 0.5])
    assert statistics.difference([1.0, 0.0, 0.5], bounded=True)[1] == 1
    low, high = statistics.difference([-0.1, 0.0, 0.1, 0.3], bounded=True)
    assert (low, high) == statistics.student([-0.1, 0.0, 0.1, 0.3]) and low < 0
    assert statistics.difference([-1.0, 0.0, -0.5], bounded=True)[0] == -1


def test_an_interval_of_few_pairs_that_differ_agrees_with_the_exact_test():
    low, high = statistics.binary_difference(5, 0, 1000)
    assert low < 0 < 0.005 < high < 0.0131
    assert statistics.binary_difference(0, 5, 1000) == pytest.approx((-high, -low), abs=1e-12)
    for only_first, only_second in itertools.product(range(21), repeat=2):
        pairs = [(1.0, 0.0)] * only_first + [(0.0, 1.0)] * only_second
        p = statistics.mcnemar(*zip(*pairs, strict=True)) if pairs else 1.0
        low, high = statistics.binary_difference(only_first, only_second, 1000)
        assert (low <= 0 <= high) == (p > 0.05) or 0.048 < p < 0.05, (only_first, only_second, p, low, high)
        assert low <= (only_first - only_second) / 1000 <= high
    assert statistics.binary_difference(3, 0, 3)[1] == 1


def test_an_interval_of_few_pairs_that_differ_covers():
    rng, covered, runs = random.Random(2), 0, 1000
    for _ in range(runs):
        draws = [rng.random() for _ in range(100)]
        only_first, only_second = sum(d < 0.05 for d in draws), sum(0.05 <= d < 0.06 for d in draws)
        low, high = statistics.binary_difference(only_first, only_second, 100)
        covered += low <= 0.04 <= high
    assert covered / runs >= 0.94, covered / runs


@pytest.mark.parametrize(("only_first", "only_second"), [(0, 0), (5, 0), (3, 9), (10, 10), (1, 0), (12, 4)])
def test_mcnemar_is_a_sum_over_all_outcomes(only_first, only_second):
    count = only_first + only_second
    seen = abs(only_first - only_second)
    as_far = sum(math.comb(count, i) for i in range(count + 1) if abs(2 * i - count) >= seen)
    first = [1.0] * only_first + [0.0] * only_second + [1.0, 0.0]
    second = [0.0] * only_first + [1.0] * only_second + [1.0, 0.0]
    assert statistics.mcnemar(first, second) == pytest.approx(as_far / 2**count, abs=1e-15)


def test_signs_are_flipped_in_every_way():
    assert statistics.sign_flips([1, 1, 1, 1, 1, -1, 0, 0]) == pytest.approx(2 * (1 + 6) / 2**6)  # as a sign test
    assert statistics.sign_flips([0.1, 0.2, 0.3]) == 2 / 8, "sums in another order are as far"
    assert statistics.sign_flips([-0.1, -0.2, -0.3]) == 2 / 8 and statistics.sign_flips([-1, -0.75, 0.5]) == 4 / 8
    assert statistics.sign_flips([0.1, 0.2, 0.3] + [0.0] * statistics.EXACT_SIGNS) == 2 / 8, (
        "exact, of those that differ"
    )
    assert statistics.sign_flips([0.0, 0.0]) == 1.0


def test_many_signs_are_drawn():
    """As McNemar's test, which is exact, to the precision of the draws; the same each time."""
    differences = [1.0] * 40 + [-1.0] * 22 + [0.0] * 30
    exact = statistics.mcnemar([float(d > 0) for d in differences], [float(d < 0) for d in differences])
    drawn = statistics.sign_flips(differences)
    assert drawn == pytest.approx(exact, abs=4 * math.sqrt(exact / statistics.RANDOM_SIGNS))
    assert drawn == statistics.sign_flips(differences)
    blocks = statistics.RANDOM_SIGNS // statistics.AT_ONCE
    assert (round(drawn * (1 + statistics.RANDOM_SIGNS)) - 1) % blocks, "each block has draws of its own"
    assert statistics.sign_flips([1.0] * 200) == 1 / (1 + statistics.RANDOM_SIGNS), "never 0"
