"""The critic's loss against its equation, explained variance against its definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from mrl.algorithms.value import explained_variance, value_loss
from tests.algorithms.sequences import close, examples, flat

NUMBERS = st.floats(-2, 2)


def oracle(v, old, r, clip):
    """(loss, d loss / d v, clipped): 1/2 max((V - R)^2, (V_old + clip(V - V_old) - R)^2)."""
    plain = (v - r) ** 2
    if not clip:
        return plain / 2, v - r, False
    near = old + min(max(v - old, -clip), clip)
    if (near - r) ** 2 > plain:
        return (near - r) ** 2 / 2, (near - r) if abs(v - old) < clip else 0.0, True
    return plain / 2, v - r, False


@examples
@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=8), st.sampled_from([0.0, 0.2, 0.5]))
def test_value_loss(tokens, clip):
    values, old, returns = zip(*tokens, strict=True)
    for v, o, r in tokens:  # no finite slope at a kink, no certain winner at a tie
        near = o + min(max(v - o, -clip), clip)
        assume(abs(abs(v - o) - clip) > 1e-6 and (near == v or abs((near - r) ** 2 - (v - r) ** 2) > 1e-9))
    values_T = flat([values]).requires_grad_()
    got = value_loss(values_T, flat([old]), flat([returns]), clip=clip)
    got.loss_T.sum().backward()
    expected = [oracle(*token, clip) for token in tokens]
    assert close(got.loss_T, [loss for loss, _, _ in expected])
    assert close(values_T.grad, [slope for _, slope, _ in expected])
    assert got.clipped_T.tolist() == [clipped for _, _, clipped in expected]


def test_the_first_update_is_not_clipped():
    values_T = torch.tensor([0.3, -1.0], dtype=torch.float64, requires_grad=True)
    got = value_loss(values_T, values_T.detach(), torch.tensor([1.0, 1.0], dtype=torch.float64), clip=0.2)
    got.loss_T.sum().backward()
    assert close(values_T.grad, [-0.7, -2.0]) and not got.clipped_T.any()


def mean(xs):
    xs = list(xs)
    return sum(xs) / len(xs)


@examples
@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=2, max_size=10))
def test_explained_variance(pairs):
    returns, errors = [r for r, _ in pairs], [r - v for r, v in pairs]
    variance = mean((r - mean(returns)) ** 2 for r in returns)
    assume(variance > 1e-6)
    expected = 1 - mean((e - mean(errors)) ** 2 for e in errors) / variance
    got = explained_variance(
        returns=mean(returns),
        returns_squared=mean(r * r for r in returns),
        error=mean(errors),
        error_squared=mean(e * e for e in errors),
    )
    assert got == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("value", [0.0, 0.1, -7.3])
def test_equal_returns_leave_nothing_to_explain(value):
    xs = [value] * 7
    got = explained_variance(returns=mean(xs), returns_squared=mean(x * x for x in xs), error=0.5, error_squared=0.9)
    assert got == 0.0
