"""metrics.jsonl as columns, read while it grows and whatever is in it."""

from __future__ import annotations

import json

import numpy
import pytest

from mrl import metrics
from mrl.report.metrics_file import Table, read_table
from tests.report import made_runs


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def read(path, *lines: str, end: str = "\n") -> Table:
    with open(path, "a", encoding="utf-8") as out:
        out.write("\n".join(lines) + end)
    return read_table(path)


def test_every_number_of_a_run_is_read_as_it_was_written(tmp_path):
    run = made_runs.make_rl(tmp_path / "run")
    table = read_table(run / "metrics.jsonl")
    assert len(table.steps) == 13 and table.notes == []
    for row, whole in enumerate(metrics.read(run / "metrics.jsonl")):
        assert table.steps[row] == whole.pop("step")
        assert {name: x for name in table.curves if not numpy.isnan(x := table.at_rows(name)[row])} == whole


def test_axes(tmp_path):
    table = read_table(made_runs.make_rl(tmp_path / "run", steps=3) / "metrics.jsonl")
    assert table.axis("step").tolist() == [0, 1, 2, 3]
    assert table.axis("tokens").tolist() == [0, 64, 128, 192]
    assert table.axis("seconds").tolist() == [2, 3, 4, 5], "of the evaluation before training, then of the steps"


def test_axes_that_a_file_does_not_say(path):
    table = read(path, '{"step": 1, "x": 1}', '{"step": 2, "x": 2}')
    assert table.axis("tokens") is None and table.axis("seconds") is None


def test_it_is_read_where_it_grows(path):
    assert not len(read_table(path).steps), "it is not there yet"
    table = read(path, '{"step": 1, "x": 1.5}', '{"step": 2, "x"', end="")
    assert table.steps.tolist() == [1] and table.notes == [], "a line that is being written is no mistake"
    table = read(path, ": 2.5}", '{"step": 3, "y": 1}')
    assert table.steps.tolist() == [1, 2, 3] and table.curves["x"].values.tolist() == [1.5, 2.5]
    assert table.curves["y"].rows.tolist() == [2] and table.notes == []


def test_what_is_no_row_is_left_out_and_said(path):
    bad = ["{", "3", "[1]", '{"x": 1}', '{"step": "2"}', '{"step": null}', '{"step": 1.5}', '{"step": NaN}']
    bad += [f'{{"step": 3, "x": {10**400}}}', f'{{"step": {2**70}}}', '{"step": 3, "x": ' + "[" * 99_999]
    table = read(path, '{"step": 1, "x": 1}', *bad, '{"step": 2.0, "x": 2}', end="")
    assert table.steps.tolist() == [1, 2] and table.curves["x"].values.tolist() == [1, 2]
    assert table.notes == ["metrics.jsonl: left out lines that are no row of metrics (2, 3, 4 and 8 more)"]


def test_values_that_are_not_finite_stay_and_are_said(path):
    """mrl itself writes none (a loss that is not finite ends the run), other writers do, as Python's JSON has them."""
    lines = [json.dumps({"step": i, "x": x}) for i, x in enumerate([1.0, float("nan"), float("-inf"), None, 2])]
    table = read(path, *lines)
    assert numpy.array_equal(table.curves["x"].values, [1, numpy.nan, -numpy.inf, numpy.nan, 2], equal_nan=True)
    assert table.notes == ["x: not finite in step 1, 2, 3"]


def test_what_is_no_number_is_named(path):
    table = read(path, '{"step": 1, "text": "a", "on": true, "list": [1], "x": 1}')
    assert sorted(table.curves) == ["on", "x"] and table.notes == ["list, text: not shown, being no numbers"]


def test_of_a_step_that_comes_again_the_last_row_counts(path):
    rows = [(1, 1), (2, 2), (3, 3), (2, 20), (3, 30), (4, 40)]
    table = read(path, *(json.dumps({"step": s, "x": v}) for s, v in rows))
    assert table.steps.tolist() == [1, 2, 3, 4] and table.at_rows("x").tolist() == [1, 20, 30, 40]
