"""A metrics.jsonl as columns, and the numbers to draw of a long one: some points, and the smooth curve through all."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from mrl.words import shorten_list

STEP, TOKENS, STEP_S, EVAL_S = "step", "train/tokens", "perf/step_s", "perf/eval_s"


@dataclasses.dataclass(frozen=True)
class Curve:
    """One metric of one run."""

    rows: numpy.ndarray  # [N] int64: which of the table's rows have it, ascending
    values: numpy.ndarray  # [N] float64; may be NaN or infinite

    @property
    def finite(self) -> numpy.ndarray:
        """[N] bool."""
        return numpy.isfinite(self.values)


@dataclasses.dataclass(frozen=True)
class Table:
    """The rows of a metrics.jsonl, in the order of their steps; no step comes twice."""

    steps: numpy.ndarray  # [R] int64
    curves: Mapping[str, Curve]  # without `step`
    notes: list[str]  # faults of the file, for a person

    def at_rows(self, name: str) -> numpy.ndarray:
        """Returns [R] float64: a metric at every row, NaN if it has none there."""
        values = numpy.full(len(self.steps), numpy.nan)
        curve = self.curves.get(name)
        if curve is not None:
            values[curve.rows] = curve.values
        return values

    def is_sparse(self, name: str) -> bool:
        """Returns whether few rows have a metric, as those of evaluations.

        It is drawn with marks. A moving average would mean nothing, because its values lie far apart.
        """
        return len(self.curves[name].rows) * 4 < len(self.steps)

    def axis(self, kind: str) -> numpy.ndarray | None:
        """Returns [R] float64: the x values of the rows; None if the file has none.

        - tokens: trained so far, `train/tokens`; a row without it has that of the row before
        - seconds: of the steps and evaluations so far; metrics.jsonl says nothing of saving, starting and waiting
        """
        if kind == "step":
            return self.steps.astype(float)
        if kind == "tokens":
            tokens = self.at_rows(TOKENS)
            if not numpy.isfinite(tokens).any():
                return None
            return numpy.maximum.accumulate(numpy.nan_to_num(tokens, nan=0.0, posinf=0.0, neginf=0.0))
        assert kind == "seconds", kind
        if STEP_S not in self.curves:
            return None
        seconds = sum(numpy.nan_to_num(self.at_rows(name), posinf=0.0, neginf=0.0) for name in (STEP_S, EVAL_S))
        return numpy.cumsum(seconds)


def read_table(path: pathlib.Path) -> Table:
    """Returns the rows of a metrics.jsonl; none if it is not there.

    For rows of one step the last counts. A last line that is being written is none yet.
    """
    content = path.read_bytes() if path.exists() else b""
    rows: dict[int, Mapping[str, float | None]] = {}
    broken = []
    lines = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            step = int(numpy.int64(int(row[STEP])))  # which fits into the table
            if step != row[STEP]:
                raise ValueError(f"step {row[STEP]!r} is no whole number")
            rows[step] = {name: _number(value) for name, value in row.items()}
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
            if number < len(lines):
                broken.append(number)
    steps = numpy.array(sorted(rows), dtype=numpy.int64)
    places: dict[str, list[int]] = {}
    values: dict[str, list[float]] = {}
    others = set()
    for place, step in enumerate(steps.tolist()):
        for name, value in rows[step].items():
            if value is None:
                others.add(name)
            elif name != STEP:
                places.setdefault(name, []).append(place)
                values.setdefault(name, []).append(value)
    curves = {name: Curve(numpy.array(places[name]), numpy.array(values[name])) for name in places}
    notes = []
    if broken:
        notes.append(f"{path.name}: left out lines that are no row of metrics ({shorten_list(broken)})")
    if others:
        notes.append(f"{', '.join(sorted(others))}: not shown, being no numbers")
    for name, curve in sorted(curves.items()):
        wrong = steps[curve.rows[~curve.finite]].tolist()
        if wrong:
            notes.append(f"{name}: not finite in step {shorten_list(wrong)}")
    return Table(steps, curves, notes)


def _number(value: Any) -> float | None:
    """Returns a value of a row; None if it is no number. Some write null for a number that is not finite."""
    if isinstance(value, str | list | dict):
        return None
    return math.nan if value is None else float(value)


MAX_POINTS = 4000
"""Points of a curve that are drawn one by one; a longer one is drawn by BUCKETS."""

BUCKETS = 500
"""Equal parts of a long curve. Of each the first, lowest, highest and last value are drawn, so that no extreme is
lost (M4: Jugel et al., "M4: A Visualization-Oriented Time Series Data Aggregation", VLDB 2014)."""


@dataclasses.dataclass(frozen=True)
class Points:
    """The places of a curve that are drawn."""

    chosen: numpy.ndarray  # [P] int64: places in the curve, ascending
    bounds: numpy.ndarray | None = None  # [B + 1] int64: the buckets; None if every point is drawn

    @property
    def is_part(self) -> bool:
        """Whether some places are not drawn."""
        return self.bounds is not None


def choose(values: numpy.ndarray, most: int = MAX_POINTS, buckets: int = BUCKETS) -> Points:
    """Returns which of the values of a curve [N] to draw.

    If a bucket has values that are not finite, its first such value is drawn: the curve has a gap there.
    """
    count = len(values)
    if count <= most:
        return Points(numpy.arange(count))
    bounds = numpy.linspace(0, count, buckets + 1).astype(numpy.int64)
    chosen: set[int] = set()
    finite = numpy.isfinite(values)
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        chosen.update((start, stop - 1))
        inside = finite[start:stop]
        if inside.any():
            part = values[start:stop]
            chosen.add(start + int(numpy.where(inside, part, numpy.inf).argmin()))
            chosen.add(start + int(numpy.where(inside, part, -numpy.inf).argmax()))
        if not inside.all():
            chosen.add(start + int(inside.argmin()))
    return Points(numpy.array(sorted(chosen), dtype=numpy.int64), bounds)


def bucket_means(values: numpy.ndarray, bounds: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Returns [B] the mean of each bucket's finite values, NaN if there are none, and [B] how many there are."""
    finite = numpy.isfinite(values)
    sums = numpy.add.reduceat(numpy.where(finite, values, 0.0), bounds[:-1])
    counts = numpy.add.reduceat(finite.astype(numpy.int64), bounds[:-1])
    with numpy.errstate(invalid="ignore", divide="ignore"):
        return sums / counts, counts


def smooth_values(values: numpy.ndarray, weight: float, counts: Sequence[int] | None = None) -> numpy.ndarray:
    """Returns the exponential moving average [N] of values, without a bias towards the first.

    weight: of what was before, from 0 (the values themselves) to below 1. counts: of how many values each is the mean.
    A value that is not finite leaves the average as it is.
    """
    if weight == 0.0:
        return values
    smoothed = numpy.full(len(values), numpy.nan)
    total = weights = 0.0
    numbers = [1] * len(values) if counts is None else counts
    for i, (value, number) in enumerate(zip(values.tolist(), numbers, strict=True)):
        if number and -numpy.inf < value < numpy.inf:
            kept = weight**number
            total = total * kept + value * (1 - kept)
            weights = weights * kept + (1 - kept)
        if weights:
            smoothed[i] = total / weights
    return smoothed
