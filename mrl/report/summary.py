"""A summary of metrics: first, last and best values, and a sparkline, as a table for the terminal and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy

from mrl.errors import printable, shortened
from mrl.report.charts import goal_of, in_order, is_main
from mrl.report.metrics_file import smooth_values
from mrl.report.runs import Run, differences_of

BLOCKS = "▁▂▃▄▅▆▇█"
SPARKLINE = 22
"""Characters."""
NAME = 34
"""Characters of a metric's name before its middle is left out."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """One metric of one run, in a few numbers. None if no value is finite, or there is no better and worse."""

    run: Run
    metric: str
    values: int  # how many there are
    first: float | None = None
    last: float | None = None
    lowest: float | None = None
    highest: float | None = None
    best: float | None = None
    best_step: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Returns numbers and null."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("run", "metric")}


def figures_of(run: Run) -> list[Figure]:
    """Returns the figures of all metrics of a run, in the order of the page."""
    is_rl = any(name.startswith(("reward/", "actor/")) for name in run.table.curves)
    return [_figure(run, name, rl=is_rl) for name in in_order(run.table.curves)]


def _figure(run: Run, name: str, *, rl: bool) -> Figure:
    curve = run.table.curves[name]
    values, steps = curve.values[curve.finite], run.table.steps[curve.rows[curve.finite]]
    if not len(values):
        return Figure(run, name, len(curve.values))
    goal = goal_of(name, rl=rl)
    best = best_step = None
    if goal is not None:
        place = int(values.argmin() if goal == "low" else values.argmax())
        best, best_step = float(values[place]), int(steps[place])
    first, last, lowest, highest = (float(x) for x in (values[0], values[-1], values.min(), values.max()))
    return Figure(run, name, len(curve.values), first, last, lowest, highest, best, best_step)


def sparkline(values: numpy.ndarray, lowest: float, highest: float, width: int = SPARKLINE) -> str:
    """Returns a curve in characters: each the mean of its part of the values, blank if none is finite."""
    width = min(width, len(values))
    text = ""
    for part in numpy.array_split(values, width) if width else []:
        finite = part[numpy.isfinite(part)]
        if not len(finite):
            text += " "
        elif highest <= lowest:
            text += BLOCKS[len(BLOCKS) // 2 - 1]
        else:
            level = (float(finite.mean()) - lowest) / (highest - lowest)
            text += BLOCKS[min(int(level * len(BLOCKS)), len(BLOCKS) - 1)]
    return text


def number(value: float | None) -> str:
    """Returns a number in at most ten characters or so."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e4:
        return str(int(value))
    if 1e4 <= abs(value) < 1e12:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def text(runs: Sequence[Run], *, smooth: float, every_metric: bool) -> str:
    """Returns the table for the terminal: of several runs, each metric's lines together, on one scale."""
    figures: dict[str, list[Figure]] = {}
    for run in runs:
        for figure in figures_of(run):
            figures.setdefault(figure.metric, []).append(figure)
    names = in_order(figures)
    several = len(runs) > 1
    shown = [name for name in names if every_metric or is_main(name)] or names
    widths = [len(printable(name)) for name in shown]
    if several:
        widths += [len(run.name) + 2 for run in runs]
    name_width = min(NAME, max(widths, default=NAME))
    lines = [printable(f"{run.path}: {run.progress}") for run in runs]
    for run in runs:
        lines += [printable(f"{run.name if several else 'note'}: {note}") for note in run.notes]
    head = f"{'metric':<{name_width}} {'first':>10} {'last':>10} {'best':>10} {'at step':>8}"
    lines += ["", head, "-" * (len(head) + 2 + SPARKLINE)]
    for name in shown:
        scale = _scale([_values(figure, smooth) for figure in figures[name]])
        if several:
            lines.append(printable(name))
        for figure in figures[name]:
            title = shortened(printable(f"  {figure.run.name}" if several else name), name_width)
            spark = sparkline(_values(figure, smooth), *scale)
            lines.append(
                f"{title:<{name_width}} {number(figure.first):>10} {number(figure.last):>10} "
                f"{number(figure.best):>10} {number(figure.best_step):>8}  {spark}"
            )
    left = len(names) - len(shown)
    if left:
        lines += ["", f"metrics that only the page has: {left}; --all shows them here"]
    return "\n".join(line.rstrip() for line in lines)


def _values(figure: Figure, smooth: float) -> numpy.ndarray:
    table = figure.run.table
    return smooth_values(table.curves[figure.metric].values, 0.0 if table.is_sparse(figure.metric) else smooth)


def _scale(curves: Sequence[numpy.ndarray]) -> tuple[float, float]:
    finite = numpy.concatenate([values[numpy.isfinite(values)] for values in curves])
    return (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)


def as_json(runs: Sequence[Run], page: str | None) -> dict[str, Any]:
    """Returns the summary as plain data."""
    differences = differences_of(runs)
    return {
        "runs": [
            {
                "path": str(run.path),
                "name": run.name,
                "state": run.state,
                "step": run.last_step,
                "total_steps": run.settings.total_steps,
                "notes": list(run.notes),
                "versions": dict(run.settings.versions),
                **run.settings.header,
                "metrics": {figure.metric: figure.as_json() for figure in figures_of(run)},
            }
            for run in runs
        ],
        "config_differences": differences.as_json(differences.keys),
        "version_differences": differences.as_json(differences.versions),
        "page": page,
    }
