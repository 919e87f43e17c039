"""Estimates, intervals and tests for an accuracy that was measured on some prompts, in plain floats.

Dimensions: `P` prompts, `N` samples of each. All intervals are of 95 %.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev

import numpy as np

from mrl.rewards.scorer import is_binary

LEVEL = 0.95
EXACT_SIGNS = 16
"""Prompts that differ, up to which every assignment of signs is looked at."""
RANDOM_SIGNS, AT_ONCE = 20_000, 1000

Interval = tuple[float, float]


def pass_at_k(values: Sequence[float], k: int) -> float:
    """Returns the expected best of `k` of the values, drawn without replacement: from N samples an unbiased estimate of
    the best of k.

    If c values are 1 and the others 0, this is `1 - C(N - c, k) / C(N, k)` (Chen et al. 2021, 2107.03374, eq. 1).
    """
    count = len(values)
    assert 1 <= k <= count, f"pass@{k} of {count} samples"
    ordered = sorted(values)
    ways = math.comb(count, k)
    return math.fsum(value * (math.comb(i, k - 1) / ways) for i, value in enumerate(ordered))


def is_bounded(values: Sequence[float]) -> bool:
    """Returns whether all values are from 0 to 1."""
    return min(values) >= 0 and max(values) <= 1


def wilson(mean: float, count: float) -> Interval:
    """Returns Wilson's score interval (1927) of a rate that was `mean` in `count` trials.

    The mean of other numbers between 0 and 1 has no larger variance: for it the interval is too wide, if anything.
    """
    z = NormalDist().inv_cdf(0.5 + LEVEL / 2)
    centre = (mean + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(mean * (1 - mean) / count + z * z / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def student(values_P: Sequence[float]) -> Interval:
    """Returns Student's interval of the mean over prompts, one value each.

    A prompt is one cluster: its samples, which are alike, count as one (Miller 2024, 2411.00640, section 2).
    """
    mean, count = fmean(values_P), len(values_P)
    if min(values_P) == max(values_P):  # also of one prompt: how far others are off is not seen
        return -math.inf, math.inf
    half = t_quantile(0.5 + LEVEL / 2, count - 1) * stdev(values_P) / math.sqrt(count)
    return mean - half, mean + half


def interval(values_P: Sequence[float]) -> Interval:
    """Returns the interval of the mean over prompts: Student's where values are not from 0 to 1, else Wilson's.

    For values between 0 and 1, Wilson's gets the number of trials at which a rate would have this mean's variance
    (Franco et al. 2019, J. Survey Statistics and Methodology 7:334). That number is lowered for Student's t, wider than
    the normal (Korn and Graubard 1998). Student's own interval is symmetric, and misses means near 0 and 1 too often.
    """
    mean, count = fmean(values_P), len(values_P)
    if not is_bounded(values_P):
        return student(values_P)
    if is_binary(values_P) or min(values_P) == max(values_P):
        return wilson(mean, count)
    z, t = NormalDist().inv_cdf(0.5 + LEVEL / 2), t_quantile(0.5 + LEVEL / 2, count - 1)
    squared_error = stdev(values_P) ** 2 / count
    return wilson(mean, mean * (1 - mean) / squared_error * (z / t) ** 2)


def difference(differences_P: Sequence[float], *, bounded: bool) -> Interval:
    """Returns the interval of the mean difference over prompts: Student's, within -1 and 1 if `bounded`.

    If all prompts have the same difference, Student's has no width. Other prompts may have another difference: at most
    a share of them by Wilson's interval of none in P, each as far off as it can be. Without bounds there is no interval
    then.

    bounded: the values behind the differences are from 0 to 1.
    """
    if min(differences_P) == max(differences_P):
        if not bounded:
            return -math.inf, math.inf
        same, share = differences_P[0], wilson(0.0, len(differences_P))[1]
        return same - share * (same + 1), same + share * (1 - same)
    low, high = student(differences_P)
    return (max(-1.0, low), min(1.0, high)) if bounded else (low, high)


def binary_difference(only_first: int, only_second: int, count: int) -> Interval:
    """Returns Tango's score interval (1998, Statistics in Medicine 17:891) of the difference of two rates.

    Both rates are on the same `count` prompts. only_first, only_second: prompts that one model alone answers.

    It has the continuity correction of McNemar's test (Edwards 1948). So it holds 0 if `mcnemar` has p > 0.05; of
    counts up to 30 the two differ at 13 to 4 and 29 to 15 alone, p = 0.049. Student's and Tango's without it exclude 0
    at 5 to none, but the exact test gives p = 0.0625.
    """
    z, seen = NormalDist().inv_cdf(0.5 + LEVEL / 2), only_first - only_second

    def is_far(difference: float) -> bool:
        """Returns whether the score test rejects this difference."""
        a, c = 2 * count, -only_second * difference * (1 - difference)
        b = -only_first - only_second + (2 * count - seen) * difference
        share = (math.sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)  # of only_second, the likeliest if it holds
        variance = count * (2 * share + difference * (1 - difference))
        return max(0.0, abs(seen - count * difference) - 1) ** 2 > z * z * max(0.0, variance)

    def bound(outside: float) -> float:
        """Returns the difference at which the test begins to reject, between the measured one and -1 or 1."""
        inside = seen / count
        if not is_far(outside):
            return outside
        for _ in range(60):
            middle = (inside + outside) / 2
            inside, outside = (inside, middle) if is_far(middle) else (middle, outside)
        return inside

    return bound(-1.0), bound(1.0)


def mcnemar(first_P: Sequence[float], second_P: Sequence[float]) -> float:
    """Returns the two-sided p-value of McNemar's exact test (McNemar 1947).

    It is a binomial test of 1/2: a prompt that one of the two alone answers is as likely the first's as the second's.
    """
    assert is_binary([*first_P, *second_P])
    pairs = list(zip(first_P, second_P, strict=True))
    only_first, only_second = pairs.count((1.0, 0.0)), pairs.count((0.0, 1.0))
    count, fewer = only_first + only_second, min(only_first, only_second)
    ways = sum(math.comb(count, i) for i in range(fewer + 1))
    return min(1.0, 2 * ways / 2**count)


def sign_flips(differences_P: Sequence[float]) -> float:
    """Returns the two-sided p-value of a paired permutation test (Fisher 1935).

    It is how often the mean difference is as far from 0 if each prompt's difference has either sign alike. With up to
    `EXACT_SIGNS` prompts that differ all signs are taken. Else `RANDOM_SIGNS` are drawn, and the observed one is added
    (Phipson and Smyth 2010).
    """
    differing = [abs(difference) for difference in differences_P if difference]
    seen = abs(math.fsum(differences_P)) * (1 - 1e-9)  # sums of the same numbers may differ in their last bits
    if len(differing) <= EXACT_SIGNS:
        sums = (
            abs(math.fsum(d * s for d, s in zip(differing, signs, strict=True)))
            for signs in itertools.product((1, -1), repeat=len(differing))
        )
        return sum(total >= seen for total in sums) / 2 ** len(differing)
    rng, sizes, as_far = np.random.Generator(np.random.Philox(0)), np.array(differing), 0
    for count in [AT_ONCE] * (RANDOM_SIGNS // AT_ONCE):
        signs = rng.integers(0, 2, (count, len(sizes)), dtype=np.int8) * 2 - 1
        as_far += int((abs(signs @ sizes) >= seen).sum())
    return (1 + as_far) / (1 + RANDOM_SIGNS)


def t_cdf(t: float, freedom: int) -> float:
    """Returns P(T <= t) of Student's t with a whole number of degrees of freedom (Abramowitz and Stegun 26.7.3-4)."""
    theta = math.atan(t / math.sqrt(freedom))
    sin, cos = math.sin(theta), math.cos(theta)
    if freedom % 2:
        term, total = cos, 0.0
        for i in range(1, freedom - 1, 2):
            total += term
            term *= cos * cos * (i + 1) / (i + 2)
        inside = 2 / math.pi * (theta + sin * total)
    else:
        term, total = 1.0, 0.0
        for i in range(0, freedom - 1, 2):
            total += term
            term *= cos * cos * (i + 1) / (i + 2)
        inside = sin * total
    return 0.5 + inside / 2


def t_quantile(probability: float, freedom: int) -> float:
    """Returns t with P(T <= t) = probability > 1/2."""
    if freedom > 1000:  # the next term of the expansion in 1 / freedom is below 1e-5
        z = NormalDist().inv_cdf(probability)
        return z + (z**3 + z) / (4 * freedom)
    low, high = 0.0, 1.0
    while t_cdf(high, freedom) < probability:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, freedom) < probability else (low, middle)
    return (low + high) / 2
