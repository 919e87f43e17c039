"""The page of a report: one HTML file that holds all it needs, plotly's JavaScript too, and uses no network.

Data stand in the page as JSON in an element that no browser runs. page.js makes text of them, never HTML, so a model's
text can do nothing there. A content security policy lets only two scripts run, which it names by their hashes.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import functools
import hashlib
import html
import importlib.resources
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

import mrl
from mrl.metric_names import METRICS
from mrl.report.charts import Chart, charts_of
from mrl.report.metrics_file import MAX_POINTS, Points, Table, bucket_means, choose
from mrl.report.runs import Differences, Run, differences_of, value_text
from mrl.report.samples import Samples
from mrl.report.summary import figures_of

MARK = "<!-- written by mrl report -->"
"""The second line of a page: what has it may be written over."""

AXES = ("step", "tokens", "seconds")


@dataclasses.dataclass(frozen=True)
class InitialView:
    """The choices that the page opens with. Its reader can change them there."""

    axis: str = "step"
    smooth: float = 0.0  # weight of the moving average, from 0 to below 1
    reload_s: int | None = None  # the page loads itself again; None where it is final


def page(runs: Sequence[Run], samples: Sequence[Samples], look: InitialView) -> bytes:
    """Returns the HTML file, in UTF-8."""
    charts = charts_of(name for run in runs for name in run.table.curves)
    data = {
        "written": datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z"),
        "version": mrl.__version__,
        "look": dataclasses.asdict(look),
        "axes": [axis for axis in AXES if any(run.table.axis(axis) is not None for run in runs)],
        "runs": [_run(run, of_run, charts) for run, of_run in zip(runs, samples, strict=True)],
        "charts": [_chart(chart) for chart in charts],
        "differences": _differences(differences_of(runs), len(runs)),
    }
    return _html(f"mrl report: {', '.join(run.name for run in runs)}", data)


def _html(title: str, data: Mapping[str, Any]) -> bytes:
    files = importlib.resources.files("mrl.report")
    scripts, hashes = _scripts()
    parts = {
        "POLICY": f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "font-src data:; base-uri 'none'; form-action 'none'",
        "TITLE": html.escape(title),
        "STYLE": (files / "page.css").read_text(encoding="utf-8"),
        "DATA": as_script_data(data),
        "PLOTLY": scripts[0],
        "SCRIPT": scripts[1],
    }
    found = (files / "page.html").read_text(encoding="utf-8").replace("MARK", MARK, 1)
    text = ""
    for name, value in parts.items():  # in the template's order, so that nothing is replaced in what was put in
        before, place, found = found.partition(f"{{{{{name}}}}}")
        assert place, f"page.html has no {name} behind the one before it"
        text += before + value
    # a file name that is no UTF-8 has halves of surrogate pairs, and JSON writes them as \\udc80
    return (text + found).encode("utf-8", errors="backslashreplace")


@functools.cache
def _scripts() -> tuple[Sequence[str], str]:
    """Returns plotly's and our own, and their hashes for the policy; 5 MB that are read once for all pages."""
    from plotly.offline import get_plotlyjs

    files = importlib.resources.files("mrl.report")
    own = "".join((files / name).read_text(encoding="utf-8") for name in ("samples.js", "page.js"))
    scripts = [get_plotlyjs().replace("\r\n", "\n"), own]
    assert not any("</script" in script.lower() for script in scripts)
    digests = [base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode() for script in scripts]
    return scripts, " ".join(f"'sha256-{digest}'" for digest in digests)


def as_script_data(data: Any) -> str:
    """Returns JSON that may stand in a <script> element: `<` begins no tag in it, and no line of it ends early."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029\ufeff\x7f":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _chart(chart: Chart) -> dict[str, Any]:
    return {
        "key": chart.key,
        "section": chart.section,
        "title": chart.title,
        "names": chart.names,
        "stacked": chart.stacked,
        "meanings": {name: _meaning(name) for name in chart.names if _meaning(name) is not None},
    }


def _meaning(name: str) -> str | None:
    if name in METRICS:
        return METRICS[name]
    if name.startswith("reward/") and name.endswith(("/mean", "/std")):
        return "of one reward alone, before its weight"
    return None


def _differences(found: Differences, count: int) -> dict[str, Any]:
    return {
        "runs": found.runs,
        "none": None if found.keys or found.versions else found.none_in_words(count),
        "keys": _texts(found.keys),
        "versions": _texts(found.versions),
    }


def _texts(rows: Mapping[str, Sequence[Any]]) -> dict[str, list[str]]:
    return {name: list(map(value_text, values)) for name, values in rows.items()}


def _run(run: Run, samples: Samples, charts: Sequence[Chart]) -> dict[str, Any]:
    """Returns the page's data of a run. Curves index into `axes`: they have the rows that some curve uses."""
    table = run.table
    chosen = {name: choose(curve.values) for name, curve in table.curves.items()}
    stacks = {chart.key: stack_curves(table, chart.names) for chart in charts if chart.stacked}
    used = [numpy.array([], dtype=numpy.int64), *(stack.rows for stack in stacks.values())]
    for name, points in chosen.items():
        of_curve = table.curves[name].rows
        used.append(of_curve[points.chosen])
        if points.bounds is not None:
            used.append(of_curve[points.bounds[1:] - 1])
    rows = numpy.unique(numpy.concatenate(used))
    return {
        "name": run.name,
        "path": str(run.path),
        "progress": run.progress,
        "notes": [*run.notes, *_long(table, chosen)],
        "axes": {axis: _numbers(at[rows]) for axis in AXES if (at := table.axis(axis)) is not None},
        "curves": {name: _curve(table, name, points, rows) for name, points in chosen.items()},
        "stacks": {key: stack.as_json(rows) for key, stack in stacks.items()},
        "figures": [{"metric": figure.metric, **figure.as_json()} for figure in figures_of(run)],
        "header": {**run.settings.header, **{f"version of {k}": v for k, v in run.settings.versions.items()}},
        "keys": {name: value_text(value) for name, value in run.settings.keys.items()},
        "samples": {"files": samples.files, "notes": samples.notes},
    }


def _long(table: Table, chosen: Mapping[str, Points]) -> list[str]:
    count = sum(points.is_part for points in chosen.values())
    if not count:
        return []
    longest = max(len(curve.rows) for curve in table.curves.values())
    return [
        f"{count} curves of up to {longest:,} values have more than {MAX_POINTS:,}: of each five-hundredth the first, "
        "lowest, highest and last value are drawn, so that no extreme is lost; zooming in shows no more"
    ]


def _curve(table: Table, name: str, points: Points, rows: numpy.ndarray) -> dict[str, Any]:
    """Returns the points of a curve, and for a long one the means of its buckets, for smoothing."""
    curve = table.curves[name]
    found: dict[str, Any] = {
        "at": _places(curve.rows[points.chosen], rows),
        "values": _numbers(curve.values[points.chosen]),
        "count": len(curve.values),
        "sparse": table.is_sparse(name),
    }
    if points.bounds is not None:
        means, counts = bucket_means(curve.values, points.bounds)
        found["buckets"] = {
            "at": _places(curve.rows[points.bounds[1:] - 1], rows),
            "values": _numbers(means),
            "counts": counts.tolist(),
        }
    return found


@dataclasses.dataclass(frozen=True)
class Stack:
    """Curves on common rows, to be drawn one over the other. For a long run, each row is the mean of a bucket."""

    rows: numpy.ndarray  # [N] int64
    values: Mapping[str, numpy.ndarray]  # [N] each, 0 where a row has no value
    each: int  # rows of metrics that one of these stands for

    def as_json(self, rows: numpy.ndarray) -> dict[str, Any]:
        values = {name: _numbers(of_name) for name, of_name in self.values.items()}
        return {"at": _places(self.rows, rows), "values": values, "each": self.each}


def stack_curves(table: Table, names: Sequence[str], most: int = MAX_POINTS) -> Stack:
    """Returns the curves of a stacked chart that the table has."""
    here = [name for name in names if name in table.curves]
    whole = {name: numpy.nan_to_num(table.at_rows(name), posinf=0.0, neginf=0.0) for name in here}
    count = len(table.steps) if here else 0
    if count <= most:
        return Stack(numpy.arange(count), whole, 1)
    each = -(-count // (most // 4))
    starts = numpy.arange(0, count, each)
    ends = numpy.append(starts[1:], count)
    values = {name: numpy.add.reduceat(of_name, starts) / (ends - starts) for name, of_name in whole.items()}
    return Stack(ends - 1, values, each)


def _places(wanted: numpy.ndarray, rows: numpy.ndarray) -> list[int]:
    return numpy.searchsorted(rows, wanted).tolist()


def _numbers(values: numpy.ndarray) -> list[float | int | None]:
    """Returns numbers as JSON has them: whole ones without a point, and null if one is not finite."""
    numbers: list[float | int | None] = []
    for value in values.tolist():
        if not math.isfinite(value):
            numbers.append(None)
        elif value == int(value) and abs(value) < 2**53:
            numbers.append(int(value))
        else:
            numbers.append(value)
    return numbers
