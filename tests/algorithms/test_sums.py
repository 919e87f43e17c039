"""Losses as sums over positions: each against its formula, its gradient written down by hand beside it."""

import numpy as np
import pytest
import torch

from mrl.algorithms.sums import DENOMINATOR, LOSSES, SummedLoss
from mrl.batch import Batch

LENGTHS = [5, 1, 7]
LOW, HIGH = 0.7, 1.1
CLIPPED = {"clip_low_threshold": LOW, "clip_high_threshold": HIGH}


def by_hand(name, lp, q, a, mask):
    """(loss, its gradient at each log-prob) in float64."""
    r = np.exp(lp - q)
    if name == "importance_sampling":
        return -(r * a).sum(), -r * a
    if name == "cispo":
        held = np.clip(r, LOW, HIGH)
        return -(held * lp * a).sum(), -held * a
    if name == "dro":
        apart = np.where(q == 0, 0.0, lp - q)
        return -(lp * a - 0.1 / 2 * apart**2).sum(), -(a - 0.1 * apart)
    if name == "gspo":
        r = np.concatenate([
            np.full(len(x), np.exp(((x - y) * m).sum() / max(m.sum(), 1)))
            for x, y, m in zip(*(np.split(of, np.cumsum(LENGTHS)[:-1]) for of in (lp, q, mask)), strict=True)
        ])  # fmt: skip
    held = np.clip(r, LOW, HIGH)
    return -np.minimum(r * a, held * a).sum(), np.where(r * a <= held * a, -r * a, 0.0)


def fields_of(name, **given):
    return {field: torch.tensor(given[field], dtype=torch.float64) for field in LOSSES[name].fields}


def batch(fields, lengths=LENGTHS):
    zeros, mask = torch.zeros(sum(lengths), dtype=torch.long), torch.ones(sum(lengths))
    return Batch(
        tokens=zeros, labels=zeros, loss_mask=mask, lengths=torch.tensor(lengths), token_fields=fields,
        denominators={DENOMINATOR: 1.0},
    )  # fmt: skip


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_loss_and_gradient(name):
    rng, count = np.random.default_rng(0), sum(LENGTHS)
    lp, a = -rng.exponential(2.0, count), rng.normal(size=count)
    q = lp + rng.normal(size=count) * 0.4 + np.repeat([-0.5, 0.0, 0.6], LENGTHS)
    mask = np.ones(count)
    prompt = [0, 1, 6]
    q[prompt] = a[prompt] = mask[prompt] = 0.0
    options = {"beta": 0.1} if name == "dro" else CLIPPED if name != "importance_sampling" else {}
    leaf = torch.tensor(lp, requires_grad=True)
    fields = fields_of(name, logprobs=q, advantages=a, sequence_ratio_mask=mask)
    loss, _ = SummedLoss(name, options)(batch(fields), {"log_probs": leaf}, {})
    loss.backward()
    expected, slope = by_hand(name, lp, q, a, mask)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(leaf.grad.numpy(), slope, rtol=1e-12, atol=1e-15)
    if name in ("ppo", "gspo"):
        assert 0 < (slope[a != 0] == 0).sum() < count - len(prompt), "some are clipped, some are not"


@pytest.mark.parametrize("columns", [(), (3,)])
def test_cross_entropy_takes_any_weights(columns):
    rng, count = np.random.default_rng(1), sum(LENGTHS)
    lp, w = rng.normal(size=(count, *columns)), rng.normal(size=(count, *columns))
    leaf = torch.tensor(lp, requires_grad=True)
    data = batch(fields_of("cross_entropy", weights=w))
    loss, _ = SummedLoss("cross_entropy", {})(data, {"log_probs": leaf}, {})
    loss.backward()
    assert loss.item() == pytest.approx(-(w * lp).sum(), rel=1e-12)
    np.testing.assert_array_equal(leaf.grad.numpy(), -w)


def test_a_ratio_beyond_all_bounds_is_finite():
    """A log-prob that a sampler's is far below: exp would be infinite, and 0 times it no number."""
    leaf = torch.tensor([-1.0, -1.0], requires_grad=True)
    fields = {"logprobs": torch.tensor([-500.0, 0.0]), "advantages": torch.tensor([1.0, 0.0])}
    loss, _ = SummedLoss("importance_sampling", {})(batch(fields, [2]), {"log_probs": leaf}, {})
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(leaf.grad).all() and leaf.grad[1] == 0
