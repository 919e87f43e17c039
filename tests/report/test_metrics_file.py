"""metrics.jsonl as columns, which points are drawn, what smoothing is, a chart for every metric; and folders of runs."""

from __future__ import annotations

import json
import pathlib
import re

import numpy
import pytest

from mrl import metrics
from mrl.errors import UserError
from mrl.metric_names import METRICS
from mrl.report.charts import CHARTS, MAIN, NOT_DRAWN, OTHER, charts_of, goal_of, is_main
from mrl.report.metrics_file import BUCKETS, Curve, Table, bucket_means, choose, read_table, smooth_values
from mrl.report.page import stack_curves
from mrl.report.runs import flatten, is_locked, read_settings, readers
from mrl.trainers.run_lock import RunLock
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


# ------------------------------------------------------------------------------------------------------ curves, charts


NOISE = numpy.random.default_rng(0).normal(size=100_003)


def test_long_curves_keep_their_extremes_and_ends():
    values = NOISE.copy()
    values[[777, 50_001]] = [60.0, -70.0]
    points = choose(values)
    assert points.is_part and len(points.chosen) <= 4 * BUCKETS
    drawn = values[points.chosen]
    assert (numpy.diff(points.chosen) > 0).all() and {0, len(values) - 1, 777, 50_001} <= set(points.chosen.tolist())
    for start, stop in zip(points.bounds[:-1], points.bounds[1:], strict=True):
        inside = drawn[(points.chosen >= start) & (points.chosen < stop)]
        assert inside.min() == values[start:stop].min() and inside.max() == values[start:stop].max()


def test_a_gap_of_a_long_curve_stays_one():
    values = NOISE.copy()
    values[3000:3002] = [numpy.nan, -70.0]
    values[6000:9000] = numpy.inf
    chosen = choose(values).chosen
    assert 3000 in chosen and numpy.isinf(values[chosen]).sum() > 10
    finite = values[chosen][numpy.isfinite(values[chosen])]
    assert finite.max() == values[numpy.isfinite(values)].max() and finite.min() == -70.0


def test_means_of_buckets():
    values = numpy.array([1.0, 3.0, numpy.nan, numpy.inf, 5.0])
    means, counts = bucket_means(values, numpy.array([0, 2, 4, 5]))
    assert means[[0, 2]].tolist() == [2.0, 5.0] and numpy.isnan(means[1]) and counts.tolist() == [2, 0, 1]


def test_smoothing():
    assert smooth_values(NOISE, 0.0) is NOISE
    assert smooth_values(numpy.array([2.0, 4.0]), 0.5) == pytest.approx([2.0, (0.5 * 2 * 0.5 + 4 * 0.5) / 0.75])
    assert smooth_values(numpy.full(50, 3.0), 0.99) == pytest.approx(numpy.full(50, 3.0)), "no bias towards zero"
    with_gap = smooth_values(numpy.array([numpy.nan, 1.0, numpy.nan, numpy.inf, 1.0]), 0.9)
    assert numpy.isnan(with_gap[0]) and with_gap[1:] == pytest.approx([1.0] * 4)


def test_smoothing_of_means_is_near_that_of_all_values():
    values = numpy.sin(numpy.arange(8000) / 900) + 0.1 * NOISE[:8000]
    points = choose(values)
    means, counts = bucket_means(values, points.bounds)
    whole = smooth_values(values, 0.99)[points.bounds[1:] - 1]
    assert smooth_values(means, 0.99, counts.tolist())[20:] == pytest.approx(whole[20:], abs=0.05)


def test_every_metric_of_mrl_has_a_chart_that_was_chosen_for_it():
    examples = {"<label>": "gsm8k", "<source>": "math", "<set>": "math", "<metric>": "loss", "<teacher>": "math"}
    names = [
        re.sub(r"<\w+>", lambda found: examples[found[0]], name) for name in METRICS if name not in {"step", *NOT_DRAWN}
    ]
    charts = charts_of(names)
    assert [chart.title for chart in charts if chart.section == OTHER] == []
    assert sorted(name for chart in charts for name in chart.names) == sorted(names), "each once"
    assert len(charts) == len(CHARTS), "and no chart of a metric that is gone"
    assert all(any(re.fullmatch(p.replace("*", ".+"), name) for name in names) for p in MAIN)


def test_metrics_that_nobody_knows_are_drawn_alone():
    charts = charts_of(["train/loss", "a/b", "a.b", "</script>", "step_time"])
    assert [(chart.key, chart.names) for chart in charts if chart.section == OTHER] == [
        ("other_script", ("</script>",)), ("other_a_b", ("a.b",)), ("other_a_b_", ("a/b",)),
        ("other_step_time", ("step_time",)),
    ]  # fmt: skip


def test_metrics_of_evaluations_are_sparse():
    rows = numpy.arange(100)
    table = Table(rows, {"x": Curve(rows, rows * 1.0), "eval": Curve(rows[::10], rows[::10] * 1.0)}, [])
    assert table.is_sparse("eval") and not table.is_sparse("x")


def test_better_and_worse():
    assert goal_of("train/loss", rl=False) == "low" and goal_of("train/loss", rl=True) is None
    assert goal_of("reward/x/mean", rl=True) == "high" and goal_of("actor/entropy", rl=True) is None
    assert goal_of("actor/sequence_kl", rl=True) is None and not is_main("actor/sequence_kl")
    assert is_main("reward/x/mean") and not is_main("reward/x/std")
    assert is_main("rewards/chosen") and is_main("rewards/rejected")  # all that kto has of answers that are no pairs


def test_stacks_of_long_runs_are_means_that_add_up():
    steps = numpy.arange(1, 10_001)
    whole, some = numpy.random.default_rng(1).random(10_000), numpy.ones(5000)
    table = Table(steps, {"a": Curve(steps - 1, whole), "b": Curve(numpy.arange(0, 10_000, 2), some)}, [])
    stack = stack_curves(table, ["a", "b", "c"])
    assert list(stack.values) == ["a", "b"] and stack.each > 1 and stack.rows[-1] == 9999
    lengths = numpy.diff(numpy.append(-1, stack.rows))
    assert (stack.values["a"] * lengths).sum() == pytest.approx(whole.sum())
    assert (stack.values["b"] * lengths).sum() == pytest.approx(5000)
    short = stack_curves(table, ["b"], most=10_000)
    assert short.each == 1 and short.values["b"][:4].tolist() == [1, 0, 1, 0], (
        "a step without one has taken no time for it"
    )


# ------------------------------------------------------------------------------------------------- directories of runs


def refusal(*paths: object, **keys: bool) -> str:
    with pytest.raises(UserError) as refused:
        readers([str(path) for path in paths], **keys)
    return str(refused.value)


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_what_config_yaml_says(tmp_path):
    run = made_runs.make_sft(tmp_path / "a")
    settings = read_settings(run / "config.yaml")
    assert settings.versions == {"mrl": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "megatron-core": "0.16.1",
                                 "transformers": "5.23.0", "transformer-engine": "absent"}  # fmt: skip
    assert settings.header == {"git": "0123abc, clean", "command": "mrl sft a.yaml", "length": "20 steps"}
    assert settings.keys["optimizer.lr"] == 0.001 and settings.keys["optimizer.betas"] == [0.9, 0.95]
    assert settings.total_steps == 20 and settings.problem is None


def test_a_config_that_cannot_be_read_is_no_reason_to_show_nothing(tmp_path):
    run = made_runs.make_sft(tmp_path / "a")
    (run / "config.yaml").write_text("a: [")
    [reader] = readers([str(run)])
    assert "config.yaml" in reader.run().notes[-1] and reader.run().settings.total_steps is None
    (run / "config.yaml").unlink()
    assert reader.run().notes == ["config.yaml is not there: no versions, keys and length of the run"]


def test_keys_by_their_dotted_names():
    assert flatten({"a": {"b": 1, "c": {"d": [1]}, "e": {}}, "f": None}) == {
        "a.b": 1,
        "a.c.d": [1],
        "a.e": {},
        "f": None,
    }


def test_folders_that_are_no_run():
    made_runs.make_sft(pathlib.Path("runs/a"))
    says = ": has no metrics.jsonl with a step; give the output_dir of a run, as in runs/demo, or --watch"
    for name in ("runs/nothing", "runs", "runs/a/metrics.jsonl"):
        assert refusal(name).startswith(name + says)
    made_runs.make_run(pathlib.Path("b"), [])
    assert refusal("b").startswith("b" + says)
    [reader] = readers(["b"], may_be_empty=True)
    assert reader.run().progress == "step 0 of 20, not running"


def test_names_are_as_long_as_it_takes():
    for name in ("x/run", "y/run", "other"):
        made_runs.make_sft(pathlib.Path(name))
    assert [reader.name for reader in readers(["x/run"])] == ["run"]
    assert [reader.name for reader in readers(["x/run", "other"])] == ["run", "other"]
    assert [reader.name for reader in readers(["x/run", "y/run"])] == ["x/run", "y/run"]


def test_whether_it_runs(tmp_path):
    """By the lock that the trainer holds; looking at it takes nothing from a run that starts."""
    run = made_runs.make_sft(tmp_path / "a", steps=20)
    [reader] = readers([str(run)])
    assert reader.run().state == "finished" and reader.run().progress == "step 20 of 20, finished"
    lock = RunLock(run, wait_s=0)
    lock.acquire()
    assert is_locked(run / ".lock") and reader.run().state == "running"
    lock.release()
    assert reader.run().state == "finished"
    (run / ".lock").write_text("process 1 on gone")  # of a run that was killed
    assert reader.run().state == "finished"
    [half] = readers([str(made_runs.make_sft(tmp_path / "b", steps=10))])
    assert half.run().progress == "step 10 of 20, not running"


def test_another_start_is_named(tmp_path):
    run = made_runs.make_sft(tmp_path / "a")
    with open(run / "config.yaml", "a") as config:
        config.write("checkpoint: {resume: runs/old/checkpoints/step_00000003}\n")
    [reader] = readers([str(run)])
    assert reader.run().notes == ["it began from the checkpoint runs/old/checkpoints/step_00000003 (checkpoint.resume)"]
