"""Importance weights between trainer and sampler, against loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrl.algorithms.correction import Correction, effective_samples, importance_weights
from tests.algorithms.sequences import close, examples, flat, ragged

CORRECTIONS = [
    Correction(mode, level, cap, floor)
    for level in ("token", "sequence")
    for mode, cap, floor in (("truncate", 2.0, 0.0), ("mask", 2.0, 0.0), ("mask", 1.5, 0.6))
]


def oracle(trainer, rollout, mask, c):
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
    expected = flat([oracle(*row, correction) for row in rows])
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
