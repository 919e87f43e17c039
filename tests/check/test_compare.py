"""Errors of tensors, and what is said of them."""

from __future__ import annotations

import dataclasses
import json
import math
from types import SimpleNamespace

import pytest
import torch

from mrl.check.compare import (
    BOUNDS,
    LayoutComparison,
    TensorErrors,
    TensorMismatch,
    clue,
    factor_of,
    is_sure,
    problems,
    relative_l2,
    tensor_errors,
    update_error,
)
from mrl.check.folder import CheckedModel
from mrl.check.measure import result_file
from mrl.check.report import Terminal, summary
from mrl.check.rows import Rows
from mrl.check.run import CheckOptions, CheckRow, Item, Listener, Report, Session
from mrl.commands.sft import SFT
from mrl.weights.json_file import plain_data
from tests.engine import tiny

NONE = TensorErrors(2, (TensorMismatch("a", 0.0),), 0)


def made(**changes) -> LayoutComparison:
    right = LayoutComparison(
        loss=2.0, expected_loss=2.0, grad_norm=1.0, expected_grad_norm=1.0, log_probs=1e-6, log_probs_at=0,
        decided_log_probs=None, decided_labels=7, start=NONE,
        gradients=NONE, weights=NONE, weights_share=1.0, bounds=BOUNDS["float32"],
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
    found = tensor_errors([*stream, ("new", torch.ones(1))], right, bound=1e-6)
    assert found.compared == 4 and found.over == 2 and {off.name for off in found.worst[:2]} == {"t1", "t3"}
    assert found.factor == pytest.approx(2) and found.missing == ["t4"] and found.unexpected == ["new"]
    every = tensor_errors([(name, tensor * 2) for name, tensor in right.items()], right, bound=1e-6)
    assert every.over == 5 and len(every.worst) == 3
    shaped = tensor_errors([("t0", torch.ones(2))], {"t0": right["t0"]}, bound=0.0)
    assert shaped.unexpected == ["t0 of shape [2], not [3]"]


def test_one_factor_of_all_is_seen():
    """As a sum that is not divided, or not reduced, has it."""
    x = torch.randn(50)
    assert factor_of(x * 0.5, x) == pytest.approx(0.5)
    assert factor_of(x.flip(0), x) is None and factor_of(x, torch.zeros(50)) is None
    two = {"a": x, "b": x + 1}
    uneven = tensor_errors([("a", x * 2), ("b", (x + 1) * 3)], two, bound=1e-6)
    assert uneven.over == 2 and uneven.factor is None
    update = tensor_errors([("a", x * 2)], {"a": x}, bound=1e-6, error=lambda name, actual, expected: 1.0)
    assert update.over == 1 and update.worst[0].factor is None  # it would be that of the weights, not of their update


def test_an_update_is_compared_where_the_gradient_is_known():
    before, gradient = torch.zeros(4), torch.tensor([1.0, -1.0, 1e-3, 0.0])
    right = -0.1 * gradient.sign()
    given = {"gradient": gradient, "grad_norm": 1.4, "rounding": 1e-4, "dtype": torch.float32}
    flipped = right * torch.tensor([1.0, 1.0, -1.0, 1.0])  # whose gradient may be 14 times its rounding
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
        ({"grad_norm": 1.002}, "gradient norm: 1.002, not 1 (1.002 times it; bound 0.001)", "backward"),
    ],
)  # fmt: skip
def test_what_differs_is_said_with_its_bound(changes, first, hint):
    lines, advice = said(**changes)
    assert lines[0] == first and hint in advice


def test_tensors_are_named():
    off = TensorErrors(
        9, (TensorMismatch("q", 0.5, 2.0), TensorMismatch("k", 0.25, 2.0), TensorMismatch("v", 1e-9)), 2, factor=2.0
    )
    lines, advice = said(gradients=off, loss=3.0)
    assert lines[1] == (
        "gradients: 2 of 9 tensors are off (bound 0.0001); all of these are 2 times what they should be; q is off by 0.5 of "
        "its size, 2 times what it should be; k is off by 0.25 of its size, 2 times what it should be"
    )
    assert "what its sum is divided by" in advice
    lost = TensorErrors(8, NONE.worst, 0, missing=["w", "x"])
    (line,), advice = said(start=lost)
    assert line == "initial weights: missing: w and 1 more" and "starts from another model" in advice
    (line,), advice = said(weights=TensorErrors(8, (TensorMismatch("w", math.inf),), 1))
    assert line.endswith("w is not finite") and advice.endswith("look at the optimizer")


def test_json_has_a_word_for_each_number():
    plain = json.loads(json.dumps(plain_data(made(log_probs=math.inf)), allow_nan=False))
    assert plain["log_probs"] is None and plain["start"]["worst"] == [{"name": "a", "error": 0.0, "factor": None}]


SWITCHED = {"log_probs": 0.5, "decided_log_probs": 1e-6}  # what another choice of experts gives
GRADIENTS = TensorErrors(9, (TensorMismatch("q", 0.5),), 1)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        (SWITCHED, "undecided"),
        ({"log_probs": 1e-4, "decided_log_probs": 1e-6}, "undecided"),  # within the bound, and far more than rounding
        ({"log_probs": 2e-6, "decided_log_probs": 1e-6}, "different"),  # nothing chose otherwise
        ({"log_probs": 0.5, "decided_log_probs": 0.4}, "different"),  # no router is before what differs
        ({"log_probs": 0.5, "decided_log_probs": None}, "different"),  # no router is undecided
        (SWITCHED | {"start": TensorErrors(2, (TensorMismatch("a", 1.0),), 1)}, "different"),
        # within their bound log-probs are no excuse for what they cannot explain
        ({"log_probs": 1e-4, "decided_log_probs": 1e-6, "loss": 4.0}, "different"),
        (
            {"log_probs": 1e-4, "decided_log_probs": 1e-6, "weights": TensorErrors(9, (TensorMismatch("q", 0.5),), 1)},
            "different",
        ),
        ({"log_probs": 1e-4, "decided_log_probs": 0.0, "decided_labels": 0}, "different"),
    ],
)
def test_a_difference_after_undecided_routers_alone_is_none(changes, verdict):
    row = row_of(gradients=GRADIENTS, **changes)
    assert row.verdict == verdict
    report = Report(rows=[row, dataclasses.replace(row_of(), layout="dp1")])
    assert (report.wrong, report.undecided) == (([], ["tp2"]) if verdict == "undecided" else (["tp2"], []))
    assert summary(report) == ("undecided: tp2; the same: 1 row" if verdict == "undecided" else "DIFFERENT: tp2")
    assert not report.nothing


def row_of(**changes) -> CheckRow:
    found = made(**changes)
    return CheckRow("", "tp2", 2, measured=found, problems=problems(found, head="lm", lengths=[4, 3]))


def test_where_nothing_is_compared_nothing_is_the_same():
    """No label is before an undecided router; no row is the same; there is nothing beside what others are compared with."""
    none = row_of(gradients=GRADIENTS, **SWITCHED | {"decided_log_probs": 0.0, "decided_labels": 0})
    assert none.verdict == "undecided" and none.clue.startswith("nothing could be compared: a router scores two")
    report = Report(rows=[none, dataclasses.replace(row_of(), layout="dp1")])
    assert report.nothing == ["tp2"] and "NOTHING COULD BE COMPARED of tp2; the same: 1 row" in summary(report)
    undecided = Report(rows=[row_of(gradients=GRADIENTS, **SWITCHED)])
    assert undecided.nothing == ["tp2"] and "the same" not in summary(undecided)
    assert summary(Report(rows=[CheckRow("", "dp1", 1)])) == "NOTHING COULD BE COMPARED of dp1"


def test_a_model_that_is_certain_of_its_labels_lets_no_gradient_of_zeros_pass():
    for bounds, most in ((BOUNDS["float32"], 0.1), (BOUNDS["bfloat16"], 0.45)):
        grown = bounds.given(torch.full((4,), -1e-7))
        assert (grown.gradients, grown.grad_norm, grown.certain) == (most, most, True) and not bounds.certain
        zeros = row_of(gradients=TensorErrors(9, (TensorMismatch("q", 1.0),), 9), grad_norm=0.0, bounds=grown)
        assert zeros.verdict == "undecided" and zeros.clue.endswith("take other rows")
        assert Report(rows=[zeros, row_of(bounds=grown)]).nothing == ["tp2"]
        assert row_of(loss=3.0, bounds=grown).verdict == "different"


def test_a_column_that_compares_nothing_is_empty(capsys):
    terminal = Terminal(dtype="bfloat16", shows=True)
    terminal.row(row_of(weights_share=0.01, bounds=BOUNDS["bfloat16"]))
    terminal.row(row_of(bounds=dataclasses.replace(BOUNDS["bfloat16"], gradients=0.42)))
    terminal.close()
    lines = capsys.readouterr().out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("tp2"))
    assert lines[first].split()[-2:] == ["-", "same"] and "not compared" in lines[first + 1]
    assert lines[first + 2].split()[-2:] == ["0.0e+00", "same"] and "gradients 0.42" in "".join(lines[first + 3 :])
    assert is_sure(torch.tensor([9.0, 0.0, 0.01]), grad_norm=9.0, rounding=0.05).tolist() == [True, True, False]


def test_a_rank_that_dies_after_its_numbers_are_written_failed(tmp_path):
    """As where one that is not the main one ends while the others have done all of their work."""
    session = Session(CheckOptions(config_path="sft.yaml"), SFT, None, tmp_path, Listener())
    session.rows = Rows([], [], tiny.uneven_batch(sequences=3), "")
    work = SimpleNamespace(config=SimpleNamespace(head="lm"))
    items = [Item(i, CheckRow("", "tp2", 2), work) for i in range(2)]
    for item in items:
        torch.save(made(), result_file(str(tmp_path), item.number))
    assert session._collect(items, "rank 1 was killed") == []
    assert [row.failed for row in session.report.rows] == [None, "rank 1 was killed"]
    assert session.report.wrong == ["tp2"]


@pytest.mark.parametrize(("raw", "dtype"), [({"num_experts": 8}, "float32"), ({"hidden_size": 8}, "bfloat16")])
def test_models_with_experts_are_compared_in_float32(tmp_path, raw, dtype):
    """In bfloat16 nearly every router is undecided, so that no fault would show."""
    (tmp_path / "config.json").write_text(json.dumps(raw))
    session = Session(CheckOptions(config_path="sft.yaml", dtype="bfloat16"), SFT, None, tmp_path, Listener())
    assert session._dtype(CheckedModel(str(tmp_path), 1, "pretrained", "")) == dtype
