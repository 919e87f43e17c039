"""Errors of tensors, and what is said of them."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from mrl.check.bounds import BOUNDS
from mrl.check.compare import Off, TensorErrors, as_json, factor_of, relative_l2, tensor_errors, update_error
from mrl.check.measure import Measured
from mrl.check.report import summary
from mrl.check.run import Report, Row
from mrl.check.verdict import clue, is_undecided, problems

NONE = TensorErrors(2, (Off("a", 0.0),), 0)


def made(**changes) -> Measured:
    right = Measured(
        loss=2.0, expected_loss=2.0, grad_norm=1.0, expected_grad_norm=1.0, log_probs=1e-6, log_probs_at=0,
        decided_log_probs=None, start=NONE,
        gradients=NONE, weights=NONE, bounds=BOUNDS["float32"],
    )  # fmt: skip
    return dataclasses.replace(right, **changes)


def said(**changes) -> tuple[list[str], str | None]:
    found = problems(made(**changes), head="lm", lengths=[4, 3])
    return list(map(str, found)), clue(found)


def test_relative_l2():
    assert relative_l2(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.0])) == pytest.approx(1 / math.sqrt(18))
    assert relative_l2(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_l2(torch.tensor([math.nan]), torch.ones(1)) == math.inf


def test_tensors_are_compared_by_name_the_worst_first():
    right = {f"t{i}": torch.full((3,), float(i + 1)) for i in range(5)}
    stream = [(name, tensor * (2 if name in ("t1", "t3") else 1)) for name, tensor in right.items() if name != "t4"]
    found = tensor_errors([*stream, ("new", torch.ones(1))], right, right, bound=1e-6)
    assert found.compared == 4 and found.over == 2 and {off.name for off in found.worst[:2]} == {"t1", "t3"}
    assert found.factor == pytest.approx(2) and found.missing == ["t4"] and found.unexpected == ["new"]
    shaped = tensor_errors([("t0", torch.ones(2))], right, ["t0"], bound=0.0)
    assert shaped.unexpected == ["t0 of shape [2], not [3]"]


def test_one_factor_of_all_is_seen():
    """As a sum that is not divided, or not reduced, has it."""
    x = torch.randn(50)
    assert factor_of(x * 0.5, x) == pytest.approx(0.5)
    assert factor_of(x.flip(0), x) is None and factor_of(x, torch.zeros(50)) is None
    two = {"a": x, "b": x + 1}
    uneven = tensor_errors([("a", x * 2), ("b", (x + 1) * 3)], two, two, bound=1e-6)
    assert uneven.over == 2 and uneven.factor is None
    update = tensor_errors([("a", x * 2)], {"a": x}, ["a"], bound=1e-6, error=lambda name, actual, expected: 1.0)
    assert update.over == 1 and update.worst[0].factor is None  # it would be that of the weights, not of their update


def test_an_update_is_compared_where_the_gradient_is_known():
    before, gradient = torch.zeros(4), torch.tensor([1.0, -1.0, 1e-9, 0.0])
    right = -0.1 * gradient.sign()
    given = {"gradient": gradient, "grad_norm": 1.4, "rounding": 1e-4, "dtype": torch.float32}
    flipped = right * torch.tensor([1.0, 1.0, -1.0, 1.0])  # whose gradient is rounding
    assert update_error(before, flipped, right, **given) == 0.0
    assert update_error(before, -right, right, **given) == pytest.approx(2)
    assert update_error(before, right + torch.tensor([0.0, 0.0, 0.0, 0.1]), right, **given) > 0.5  # an exact 0 is known
    assert update_error(before, torch.full((4,), math.nan), right, **given) == math.inf


def test_a_unit_in_the_last_place_of_a_weight_is_rounding():
    before, right = torch.ones(4), torch.ones(4) - 1e-5
    given = {"gradient": torch.ones(4), "grad_norm": 2.0, "rounding": 1e-4, "dtype": torch.float32}
    assert update_error(before, right + 1e-7, right, **given) == 0.0
    assert update_error(before, right + 1e-6, right, **given) > 0.05


def test_bounds_grow_where_the_model_is_certain():
    bounds = BOUNDS["float32"]
    assert bounds.given(torch.tensor([-2.0, 0.0, -1.0])) == bounds
    grown = bounds.given(torch.full((4,), -1e-3))
    assert grown.gradients == pytest.approx(20 * bounds.gradients, rel=0.01) and grown.log_probs == bounds.log_probs


def test_a_right_layout_has_no_problem():
    assert said() == ([], None)


@pytest.mark.parametrize(
    ("changes", "first", "hint"),
    [
        ({"loss": 1.0}, "loss: 1, not 2 (0.5 times it; bound 1e-05)", "the loss that is reported is not"),
        ({"log_probs": 0.5, "log_probs_at": 5}, "log-probs: off by up to 0.5 (bound 0.0005), at token 1 of sequence 1", "forward"),
        ({"log_probs": math.inf}, "log-probs: off by up to inf (bound 0.0005), at token 0 of sequence 0", "forward"),
        ({"grad_norm": 1.5}, "gradient norm: 1.5, not 1 (1.5 times it; bound 0.001)", "backward"),
    ],
)  # fmt: skip
def test_what_differs_is_said_with_its_bound(changes, first, hint):
    lines, advice = said(**changes)
    assert lines[0] == first and hint in advice


def test_tensors_are_named():
    off = TensorErrors(9, (Off("q", 0.5, 2.0), Off("k", 0.25, 2.0), Off("v", 1e-9)), 2, factor=2.0)
    lines, advice = said(gradients=off, loss=3.0)
    assert lines[1] == (
        "gradients: 2 of 9 tensors are off (bound 0.0001); all of these are 2 times what they should be; q is off by 0.5 of "
        "its size, 2 times what it should be; k is off by 0.25 of its size, 2 times what it should be"
    )
    assert "what its sum is divided by" in advice
    lost = TensorErrors(8, NONE.worst, 0, missing=["w", "x"])
    (line,), advice = said(start=lost)
    assert line == "initial weights: missing: w and 1 more" and "starts from another model" in advice
    (line,), advice = said(weights=TensorErrors(8, (Off("w", math.inf),), 1))
    assert line.endswith("w is not finite") and advice.endswith("look at the optimizer")


def test_json_has_a_word_for_each_number():
    plain = json.loads(json.dumps(as_json(made(log_probs=math.inf)), allow_nan=False))
    assert plain["log_probs"] is None and plain["start"]["worst"] == [{"name": "a", "error": 0.0, "factor": None}]


@pytest.mark.parametrize(
    ("changes", "undecided"),
    [
        ({"log_probs": 0.5, "decided_log_probs": 1e-6}, True),
        ({"log_probs": 1e-4, "decided_log_probs": 1e-6}, True),  # within the bound, and far more than rounding
        ({"log_probs": 2e-6, "decided_log_probs": 1e-6}, False),  # nothing chose otherwise
        ({"log_probs": 0.5, "decided_log_probs": 0.4}, False),  # no router is before what differs
        ({"log_probs": 0.5, "decided_log_probs": 0.0}, True),  # all of the batch comes after one
        ({"log_probs": 1e-6, "decided_log_probs": 0.0}, False),
        ({"log_probs": 0.02, "decided_log_probs": 0.01, "bounds": BOUNDS["bfloat16"]}, True),  # as measured of gpt_oss
        ({"log_probs": 2.0, "decided_log_probs": 1.5, "bounds": BOUNDS["bfloat16"]}, False),
        ({"log_probs": 0.5, "decided_log_probs": None}, False),  # no router is undecided
        ({"log_probs": 0.5, "decided_log_probs": 1e-6, "start": TensorErrors(2, (Off("a", 1.0),), 1)}, False),
    ],
)
def test_a_difference_after_undecided_routers_alone_is_none(changes, undecided):
    assert is_undecided(made(**changes)) is undecided
    off = TensorErrors(9, (Off("q", 0.5),), 1)
    differ = problems(made(gradients=off, **changes), head="lm", lengths=[4, 3])
    row = Row("", "tp2", 2, measured=made(gradients=off, **changes), problems=differ)
    assert row.verdict == ("undecided" if undecided else "different")
    report = Report(rows=[row, Row("", "dp1", 1, measured=made())])
    assert (report.wrong, report.undecided) == (([], ["tp2"]) if undecided else (["tp2"], []))
    assert summary(report) == ("undecided: tp2; the same: 1 row" if undecided else "DIFFERENT: tp2")
