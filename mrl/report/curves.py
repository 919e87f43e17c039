"""Numbers to draw: which points of a long curve, and the smooth one through it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy

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
