"""metrics.jsonl as columns, read while it grows and whatever is in it."""

from __future__ import annotations

import json
import os

import numpy
import pytest

from mrl import metrics
from mrl.report.metrics_file import MetricsFile
from tests.report import made_runs


@pytest.fixture
def file(tmp_path):
    return MetricsFile(tmp_path / "metrics.jsonl")


def write(file: MetricsFile, *lines: str, end: str = "\n", mode: str = "a") -> None:
    with open(file.path, mode, encoding="utf-8") as out:
        out.write("\n".join(lines) + end)


def read(file: MetricsFile, *lines: str, **keys):
    write(file, *lines, **keys)
    file.read()
    return file.table()


def test_every_number_of_a_run_is_read_as_it_was_written(tmp_path):
    run = made_runs.make_rl(tmp_path / "run")
    file = MetricsFile(run / "metrics.jsonl")
    assert file.read() and len(file) == 13
    table = file.table()
    for row, whole in enumerate(metrics.read(run / "metrics.jsonl")):
        assert table.steps[row] == whole.pop("step")
        assert {name: x for name in table.curves if not numpy.isnan(x := table.at_rows(name)[row])} == whole
    assert table.notes == []


def test_axes(tmp_path):
    file = MetricsFile(made_runs.make_rl(tmp_path / "run", steps=3) / "metrics.jsonl")
    file.read()
    table = file.table()
    assert table.axis("step").tolist() == [0, 1, 2, 3]
    assert table.axis("tokens").tolist() == [0, 64, 128, 192]
    assert table.axis("seconds").tolist() == [2, 3, 4, 5], "of the evaluation before training, then of the steps"


def test_axes_that_a_file_does_not_say(file):
    table = read(file, '{"step": 1, "x": 1}', '{"step": 2, "x": 2}')
    assert table.axis("tokens") is None and table.axis("seconds") is None


def test_it_is_read_on_where_it_grows(file):
    assert not file.read(), "it is not there yet"
    write(file, '{"step": 1, "x": 1.5}', '{"step": 2, "x"', end="")
    assert file.read() and len(file) == 1, "a line that is being written is none yet, and no mistake"
    assert not file.read() and file.table().notes == []
    write(file, ": 2.5}", '{"step": 3, "y": 1}')
    assert file.read()
    table = file.table()
    assert table.steps.tolist() == [1, 2, 3] and table.curves["x"].values.tolist() == [1.5, 2.5]
    assert table.curves["y"].rows.tolist() == [2] and table.notes == []


def test_a_last_line_that_is_whole_but_for_its_end_counts_once(file):
    assert read(file, '{"step": 1}', '{"step": 2}', end="").steps.tolist() == [1, 2]
    assert read(file, "", '{"step": 3}', "x").steps.tolist() == [1, 2, 3]
    assert file.table().notes == ["metrics.jsonl: 1 line is no row of metrics and left out (line 4)"]


def test_a_run_that_goes_on_from_a_checkpoint_rewinds_the_file(tmp_path):
    file = MetricsFile(made_runs.make_sft(tmp_path / "run") / "metrics.jsonl")
    file.read()
    metrics.rewind(file.path, 12)
    assert file.read() and file.table().steps.tolist() == list(range(1, 13))
    log = metrics.MetricsLog(file.path)
    log.write(13, {"train/loss": 7.0})
    log.close()
    assert file.read() and file.table().at_rows("train/loss")[12] == 7.0


def test_another_file_of_the_same_number_and_a_like_length_is_begun_anew(file):
    read(file, '{"step": 1, "x": 1}', '{"step": 2, "x": 2}')
    before = os.stat(file.path).st_ino
    table = read(file, '{"step": 5, "x": 3}', '{"step": 6, "x": 4}', '{"step": 7, "x": 5}', mode="r+")
    assert os.stat(file.path).st_ino == before and table.steps.tolist() == [5, 6, 7]


def test_what_is_no_row_is_left_out_and_said(file):
    bad = ["{", "3", "[1]", '{"x": 1}', '{"step": "2"}', '{"step": null}', '{"step": 1.5}', '{"step": true}',
           '{"step": NaN}', '{"step": Infinity}', "[" * 100_000, '{"step": 1' + "0" * 5000 + "}"]  # fmt: skip
    table = read(file, '{"step": 1, "x": 1}', *bad, '{"step": 2, "x": 2}')
    with open(file.path, "ab") as out:
        out.write(b'{"step": 3, "x": "\xff"}\n')
    file.read()
    table = file.table()
    assert table.steps.tolist() == [1, 2] and table.curves["x"].values.tolist() == [1, 2]
    assert table.notes == ["metrics.jsonl: 13 lines are no row of metrics and left out (line 2, 3, 4, ...)"]


def test_values_that_are_not_finite_stay_and_are_said(file):
    """mrl itself writes none (a loss that is not finite ends the run), other writers do, as Python's JSON has them."""
    lines = [
        json.dumps({"step": i, "x": x}) for i, x in enumerate([1.0, float("nan"), float("-inf"), 10**400, None, 2])
    ]
    table = read(file, *lines)
    assert numpy.array_equal(
        table.curves["x"].values, [1, numpy.nan, -numpy.inf, numpy.inf, numpy.nan, 2], equal_nan=True
    )
    assert table.curves["x"].finite.tolist() == [True, False, False, False, False, True]
    assert table.notes == ["x: 4 values are not finite (step 1, 2, 3, ...)"]


def test_what_is_no_number_is_named(file):
    table = read(file, '{"step": 1, "text": "a", "on": true, "list": [1], "x": 1}', '{"step": 2, "text": "b"}')
    assert sorted(table.curves) == ["on", "x"] and table.curves["on"].values.tolist() == [1.0]
    assert table.notes == ["list: 1 value is no number and not shown", "text: 2 values are no number and not shown"]


def test_of_a_step_that_comes_again_the_last_row_counts(file):
    table = read(
        file, *(json.dumps({"step": s, "x": v}) for s, v in [(1, 1), (2, 2), (3, 3), (2, 20), (3, 30), (4, 40)])
    )
    assert table.steps.tolist() == [1, 2, 3, 4] and table.at_rows("x").tolist() == [1, 20, 30, 40]
    assert table.notes == ["metrics.jsonl: 2 rows are of a step that comes again later; the last one counts"]
