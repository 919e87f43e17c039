"""Which points of long curves are drawn, what smoothing is, and that every metric has a chart."""

from __future__ import annotations

import re

import numpy
import pytest

from mrl.metric_names import METRICS
from mrl.report.charts import CHARTS, MAIN, NOT_DRAWN, OTHER, charts_of, goal_of, is_main
from mrl.report.metrics_file import BUCKETS, Curve, Table, bucket_means, choose, smooth_values
from mrl.report.page import stack_curves

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
