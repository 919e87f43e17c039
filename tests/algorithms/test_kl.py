"""KL estimates, their gradients, and the controller of Ziegler 2019."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrl.algorithms.kl import KL_ESTIMATORS, KLController, kl_estimate, sequence_kl
from tests.algorithms.sequences import close, examples, flat, ragged


def oracle(name, a, b):
    """Schulman 2020, with r = q / p."""
    r = math.exp(b - a)
    return {"k1": -math.log(r), "k2": math.log(r) ** 2 / 2, "k3": (r - 1) - math.log(r)}[name]


@pytest.mark.parametrize("name", KL_ESTIMATORS)
@examples
@given(case=ragged())
def test_estimates(name, case):
    policy, reference = case.rows(-5, 0), case.rows(-5, 0)
    expected = [
        [oracle(name, a, b) for a, b in zip(*rows, strict=True)] for rows in zip(policy, reference, strict=True)
    ]  # fmt: skip
    got = kl_estimate(flat(policy), flat(reference), name)
    assert close(got, expected)
    assert name == "k1" or (got >= 0).all()
    assert torch.equal(kl_estimate(flat(policy), flat(policy), name), torch.zeros(case.mask_T.numel()).double())


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_trap_22_a_gradient_flows_to_the_policy_alone(name):
    policy = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5, -1.0], dtype=torch.float64, requires_grad=True)
    kl_estimate(policy, reference, name).sum().backward()
    assert reference.grad is None and policy.grad.abs().min() > 0
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, reference, name), policy)


def test_k3_is_bounded_where_it_would_overflow_and_capped_where_asked():
    """A log-ratio counts as at most 20 either way (verl, core_algos.kl_penalty_forward); `cap` bounds the estimate."""
    policy = torch.tensor([-1000.0, -21.0, -19.0, -2.0, -1.0, 0.0], requires_grad=True)
    reference = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, -1000.0])
    exact = [math.exp(20) - 21, math.exp(20) - 21, math.exp(19) - 20, math.exp(2) - 3, math.e - 2, 19.0]
    estimate = kl_estimate(policy, reference, "k3")
    estimate.sum().backward()
    assert estimate.tolist() == pytest.approx(exact, rel=1e-6)
    assert policy.grad.tolist() == pytest.approx([0, 0, 1 - math.exp(19), 1 - math.exp(2), 1 - math.e, 0], rel=1e-6)
    policy.grad = None
    capped = kl_estimate(policy, reference, "k3", cap=4.0)
    capped.sum().backward()
    assert capped.tolist() == pytest.approx([min(x, 4.0) for x in exact], rel=1e-6)
    assert policy.grad.tolist() == pytest.approx([0, 0, 0, 0, 1 - math.e, 0], rel=1e-6)


@examples
@given(ragged(trained=False))
def test_sequence_kl(case):
    rows = case.rows(0, 1)
    sums = [
        sum(x for x, m in zip(row, mask, strict=True) if m)
        for row, mask in zip(rows, case.masks, strict=True)
        if any(mask)
    ]
    expected = sum(sums) / len(sums) if sums else 0.0
    assert sequence_kl(flat(rows), case.mask_T, case.lengths_S) == pytest.approx(expected)


# -- the controller -------------------------------------------------------------------------------------------------------


@examples
@given(st.lists(st.floats(0, 20), max_size=20), st.floats(0.01, 1), st.floats(0.5, 10))
def test_adaptive_controller(measured, coef, target):
    """Ziegler 2019: e = clip((KL - target) / target, -0.2, 0.2), coef <- coef (1 + 0.1 e)."""
    controller, expected = KLController(coef, target=target), coef
    for value in measured:
        error = (value - target) / target
        error = 0.2 if error > 0.2 else -0.2 if error < -0.2 else error
        expected = expected * (1 + 0.1 * error)
        assert controller.update(value) == pytest.approx(expected)
    assert controller.coef == pytest.approx(expected)


def test_a_controller_goes_on_where_its_checkpoint_was():
    rng = random.Random(0)
    measured = [rng.uniform(0, 12) for _ in range(10)]
    whole = KLController(0.2, target=6.0)
    first, second = KLController(0.2, target=6.0), KLController(0.2, target=6.0)
    expected = [whole.update(kl) for kl in measured]
    for kl_value in measured[:4]:
        first.update(kl_value)
    second.load_state_dict(first.state_dict())
    assert [second.update(kl) for kl in measured[4:]] == expected[4:]
