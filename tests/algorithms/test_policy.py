"""Policy objectives, values and gradients, against their equations token by token.

Gradients are those that the equations say, written by hand: `sg` (a stopped gradient) has no finite difference.

Importance weights between trainer and sampler, against loops.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from mrl.algorithms.policy import (
    OBJECTIVES,
    RATIOS,
    Clip,
    Correction,
    effective_samples,
    importance_weights,
    largest_ratio,
)
from tests.algorithms.sequences import close, examples, flat, ragged

CLIPS = st.sampled_from([Clip(0.2, 0.2), Clip(0.2, 0.28), Clip(0.1, 0.5, 3.0), Clip(0.3, 0.2, 1.5), Clip(1.0, 4.0)])


def ratio_oracle(name, new, old, mask):
    """Of one sequence, a list: PPO's r_t; GSPO's s = (p(y) / p_old(y))^(1/|y|) over the trained tokens (eq. 7)."""
    if name == "token":
        return [math.exp(a) / math.exp(b) for a, b in zip(new, old, strict=True)]
    n = sum(mask)
    p = math.prod(math.exp(a) for a, m in zip(new, mask, strict=True) if m)
    p_old = math.prod(math.exp(b) for b, m in zip(old, mask, strict=True) if m)
    return [(p / p_old) ** (1 / n) if n else 1.0] * len(mask)


@pytest.mark.parametrize("name", RATIOS)
@examples
@given(case=ragged(trained=False))
def test_ratios(name, case):
    new, old = case.rows(-3, 0), case.rows(-3, 0)
    got = RATIOS[name](flat(new), flat(old), case.mask_T, case.lengths_S)
    rows = zip(new, old, case.masks, strict=True)
    assert close(got, [ratio_oracle(name, *row) for row in rows])
    assert (RATIOS[name](flat(old), flat(old), case.mask_T, case.lengths_S) == 1).all()


@pytest.mark.parametrize("name", RATIOS)
@examples
@given(case=ragged())
def test_gradients_of_ratios(name, case):
    """With weights c_t: of sum c_t r_t, d/d log p_t = c_t r_t; s / |y| times the sequence's c; c_t s (GSPO-token)."""
    new, old = case.rows(-3, 0), case.rows(-3, 0)
    factors = [[c * m for c, m in zip(*p, strict=True)] for p in zip(case.rows(-1, 1), case.masks, strict=True)]
    log_probs_T = flat(new).requires_grad_()
    (RATIOS[name](log_probs_T, flat(old), case.mask_T, case.lengths_S) * flat(factors)).sum().backward()
    expected = []
    for a, b, mask, c in zip(new, old, case.masks, factors, strict=True):
        r, n = ratio_oracle(name, a, b, mask), max(1, sum(mask))
        of_all = sum(c) / n
        expected.append([(of_all * m if name == "sequence" else c[t]) * r[t] for t, m in enumerate(mask)])
    assert close(log_probs_T.grad, expected)


def clip_oracle(r, a, clip):
    """(loss, d loss / d r): Schulman 2017, eq. 7 with two bounds (Yu 2025, eq. 10); Ye 2020 where a < 0."""
    kept = min(max(r, 1 - clip.low), 1 + clip.high)
    objective, slope = (r * a, a) if r * a <= kept * a else (kept * a, 0.0)
    if clip.dual and a < 0 and objective < clip.dual * a:
        objective, slope = clip.dual * a, 0.0
    return -objective, -slope


def cispo_oracle(r, a, clip, log_prob):
    """(loss, d loss / d log p): MiniMax-M1 2025, eq. 4-5."""
    weight = min(max(r, 1 - clip.low), 1 + clip.high)
    return -weight * a * log_prob, -weight * a


def away_from_kinks(r, clip):
    return all(abs(r - bound) > 1e-6 for bound in (1 - clip.low, 1 + clip.high, clip.dual))


@examples
@given(st.lists(st.tuples(st.floats(-3, 0), st.floats(-3, 0), st.floats(-2, 2)), min_size=1, max_size=8), CLIPS)
def test_objectives(tokens, clip):
    new, old, advantages = zip(*tokens, strict=True)
    ratios = [math.exp(a - b) for a, b in zip(new, old, strict=True)]
    assume(all(away_from_kinks(r, clip) for r in ratios))
    expected = {
        "clip": [clip_oracle(r, a, clip) for r, a in zip(ratios, advantages, strict=True)],
        "cispo": [cispo_oracle(r, a, clip, x) for r, a, x in zip(ratios, advantages, new, strict=True)],
        "policy_gradient": [(-a * x, -a) for a, x in zip(advantages, new, strict=True)],
    }
    expected["clip"] = [(loss, slope * r) for (loss, slope), r in zip(expected["clip"], ratios, strict=True)]
    for name, objective in OBJECTIVES.items():
        log_probs_T = flat([new]).requires_grad_()
        ratio_T = (log_probs_T - flat([old])).exp()
        got = objective(ratio_T, log_probs_T, flat([advantages]), clip)
        got.loss_T.sum().backward()
        assert close(got.loss_T, [loss for loss, _ in expected[name]])
        assert close(log_probs_T.grad, [slope for _, slope in expected[name]])


@examples
@given(st.floats(-1, 3), st.floats(-2, 2), CLIPS)
def test_clip_fraction_counts_where_clipping_changed_something(log_ratio, advantage, clip):
    """For the surrogate that is where an advantage no longer pushes; for CISPO where the weight is not the ratio."""
    r = math.exp(log_ratio)
    assume(away_from_kinks(r, clip) and abs(advantage) > 1e-6)
    for name, objective in OBJECTIVES.items():
        ratio_T = torch.tensor([r], dtype=torch.float64)
        args = (ratio_T, ratio_T.log(), torch.tensor([advantage], dtype=torch.float64), clip)
        clipped = bool(objective(*args).clipped_T)
        outside = not 1 - clip.low < r < 1 + clip.high
        expected = {"clip": clip_oracle(r, advantage, clip)[1] == 0.0, "cispo": outside, "policy_gradient": False}
        assert clipped == expected[name], name


@examples
@given(ragged(trained=False))
def test_largest_ratio(case):
    new, old = case.rows(-3, 0), case.rows(-3, 0)
    ratios = [
        max(math.exp(a - b), math.exp(b - a))
        for rows in zip(new, old, case.masks, strict=True)
        for a, b, m in zip(*rows, strict=True)
        if m
    ]
    assert largest_ratio(flat(new), flat(old), case.mask_T) == pytest.approx(max(ratios, default=1.0))


CORRECTIONS = [
    Correction(mode, level, cap, floor)
    for level in ("token", "sequence")
    for mode, cap, floor in (("truncate", 2.0, 0.0), ("mask", 2.0, 0.0), ("mask", 1.5, 0.6))
]


def weight_oracle(trainer, rollout, mask, c):
    """Of one sequence: its weights at the tokens that train."""
    ratios = [math.exp(a) / math.exp(b) for a, b in zip(trainer, rollout, strict=True)]
    if c.level == "sequence":
        ratios = [math.prod(r for r, m in zip(ratios, mask, strict=True) if m)] * len(mask)
    if c.mode == "truncate":
        return [min(r, c.cap) for r in ratios]
    return [r if c.floor <= r <= c.cap else 0.0 for r in ratios]


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda c: f"{c.level}-{c.mode}-{c.floor}")
@examples
@given(case=ragged())
def test_importance_weights(correction, case):
    trainer, rollout = case.rows(-3, 0), case.rows(-3, 0)
    trainer_T = flat(trainer).requires_grad_()
    got = importance_weights(trainer_T, flat(rollout), case.mask_T, case.lengths_S, correction=correction)
    rows = zip(trainer, rollout, case.masks, strict=True)
    expected = flat([weight_oracle(*row, correction) for row in rows])
    assert close(got.weight_T * case.mask_T, (expected * case.mask_T).tolist())
    assert not got.weight_T.requires_grad
    unlimited = Correction("truncate", correction.level, math.inf)
    ratio = importance_weights(trainer_T, flat(rollout), case.mask_T, case.lengths_S, correction=unlimited).weight_T
    assert torch.equal(got.limited_T, got.weight_T != ratio)


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda c: f"{c.level}-{c.mode}-{c.floor}")
@examples
@given(ragged(), st.sampled_from([0.0, math.nan, -math.inf]))
def test_equal_log_probs_weigh_exactly_one_whatever_stands_outside_the_mask(correction, case, junk):
    rows = case.rows(-3, 0)
    log_probs_T = flat(rows)
    rollout_T = log_probs_T.masked_fill(case.mask_T == 0, junk)
    got = importance_weights(log_probs_T, rollout_T, case.mask_T, case.lengths_S, correction=correction)
    assert (got.weight_T == 1).all() and not got.limited_T.any()


def test_a_long_sequence_far_off_neither_overflows_nor_divides():
    """A product over many tokens leaves fp32: its weight is the cap, or nothing."""
    trainer_T, rollout_T = torch.full((1000,), -1.0), torch.full((1000,), -2.0)
    for mode, expected in (("truncate", 2.0), ("mask", 0.0)):
        got = importance_weights(
            trainer_T, rollout_T, torch.ones(1000), torch.tensor([1000]), correction=Correction(mode, "sequence")
        )
        assert (got.weight_T == expected).all() and got.limited_T.all()


def test_the_effective_sample_size_is_a_share():
    weights = torch.tensor([2.0, 1.0, 0.5, 0.0])
    found = effective_samples(float(weights.mean()), float(weights.square().mean()))
    assert found == pytest.approx(float(weights.sum()) ** 2 / (4 * float(weights.square().sum())))
    assert effective_samples(0.0, 0.0) == 0
