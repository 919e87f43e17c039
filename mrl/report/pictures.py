"""The charts of a report as PNG files, drawn without a browser."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy

from mrl.errors import one_line, shortened
from mrl.report.charts import Chart, charts_of
from mrl.report.metrics_file import choose, smooth_values
from mrl.report.page import InitialView, stack_curves
from mrl.report.runs import Run

INCHES, DOTS = (7.0, 3.6), 110
COLOURS = ("#2458a8", "#d1622b", "#2c8c4b", "#a33b8f", "#8a6d1d", "#1e8f97", "#b3283c", "#5d55b5", "#5a6b2f", "#777777")
DASHES = ("-", ":", "--", "-.")
AXIS_TITLES = {"step": "step", "tokens": "tokens trained", "seconds": "seconds of steps and evaluations"}
SOFTWARE = "mrl report"
"""Stands at the beginning of each of our PNG files."""

LEGEND = 12
"""Lines that a legend names; a picture of more has none of them, and its page has them all."""


def write_pictures(folder: pathlib.Path, runs: Sequence[Run], look: InitialView) -> list[pathlib.Path]:
    """Writes a picture of each chart, and removes those of an earlier report that these runs do not have."""
    folder.mkdir(exist_ok=True)
    written = []
    for chart in charts_of(name for run in runs for name in run.table.curves):
        parts = [list(runs)]
        if chart.stacked:
            parts = [[run] for run in runs if any(name in run.table.curves for name in chart.names)]
        for number, part in enumerate(parts, start=1):
            path = folder / (f"{chart.key}.png" if len(parts) == 1 else f"{chart.key}_{number}.png")
            _write(path, chart, part, look)
            written.append(path)
    for path in set(folder.glob("*.png")) - set(written):
        if SOFTWARE.encode() in path.open("rb").read(1000):
            path.unlink()
    return written


def _write(path: pathlib.Path, chart: Chart, runs: Sequence[Run], look: InitialView) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, dpi=DOTS)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.1, 0.13, 0.88, 0.78))  # a layout that is computed takes as long as the drawing
    title = chart.title if not chart.stacked or len(runs) > 1 else f"{chart.title}: {runs[0].name}"
    axes.set_title(_text(title, 90), fontsize=10)
    axes.set_xlabel(AXIS_TITLES[look.axis], fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    if chart.stacked:
        _stack(axes, chart, runs[0], look.axis)
    else:
        _lines(axes, chart, runs, look)
    handles, labels = axes.get_legend_handles_labels()
    if 1 < len(labels) <= LEGEND:
        axes.legend(handles, labels, fontsize=7, framealpha=0.7)
    temporary = path.with_name(f"{path.name}.tmp")
    figure.savefig(temporary, format="png", metadata={"Software": SOFTWARE})
    os.replace(temporary, path)


def _lines(axes: Any, chart: Chart, runs: Sequence[Run], look: InitialView) -> None:
    for r, run in enumerate(runs):
        at = run.table.axis(look.axis)
        for m, name in enumerate(chart.names):
            curve = run.table.curves.get(name)
            if at is None or curve is None:
                continue
            places = choose(curve.values).chosen
            colour, dash = COLOURS[(r if len(runs) > 1 else m) % len(COLOURS)], DASHES[m % len(DASHES)]
            how = {"color": colour, "linestyle": dash if len(runs) > 1 else "-", "linewidth": 1.2}
            x, y = at[curve.rows[places]], numpy.where(curve.finite, curve.values, numpy.nan)[places]
            label = name
            if len(runs) > 1:
                label = run.name if len(chart.names) == 1 else f"{run.name}: {name}"
            label = _text(label, 60)
            marker = "." if len(x) <= 60 or run.table.is_sparse(name) else None
            if not look.smooth or run.table.is_sparse(name):
                axes.plot(x, y, label=label, marker=marker, **how)
                continue
            axes.plot(x, y, alpha=0.3, marker=marker, **how)
            axes.plot(x, smooth_values(curve.values, look.smooth)[places], label=label, **how)


def _stack(axes: Any, chart: Chart, run: Run, axis: str) -> None:
    stack, at = stack_curves(run.table, chart.names), run.table.axis(axis)
    if at is None or not stack.values:
        return
    colours = [COLOURS[chart.names.index(name) % len(COLOURS)] for name in stack.values]
    axes.stackplot(
        at[stack.rows], *stack.values.values(), labels=list(stack.values), colors=colours, alpha=0.8, step="mid"
    )


def _text(text: str, longest: int) -> str:
    """Returns a name that matplotlib writes as it is: it takes what is between two $ for mathematics."""
    return shortened(one_line(text), longest).replace("$", r"\$")
