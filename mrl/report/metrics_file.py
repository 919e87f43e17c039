"""A metrics.jsonl as columns: read as it grows, whatever is wrong with lines of it."""

from __future__ import annotations

import array
import collections
import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import numpy

from mrl.errors import UserError, shortened

STEP, TOKENS, STEP_S, EVAL_S = "step", "train/tokens", "perf/step_s", "perf/eval_s"
TAIL = 200
"""Bytes before the position of the next read: they must still be the same."""

NUMBERS_SHOWN = 3
"""Line numbers, steps or names that a note lists before it says how many there are."""


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


class MetricsFile:
    """A metrics.jsonl that may still grow; `read` takes what has come since the last call."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self._inode: tuple[int, int] | None = None
        self._offset = 0  # bytes read
        self._tail = b""  # the last of them
        self._lines = 0  # lines read
        self._steps = array.array("q")
        self._rows: dict[str, array.array[int]] = {}
        self._values: dict[str, array.array[float]] = {}
        self._broken: list[int] = []  # numbers of lines
        self._not_numbers: collections.Counter[str] = collections.Counter()

    def read(self) -> bool:
        """Returns whether there are new rows, or other ones: a resumed run replaces the file."""
        try:
            with open(self.path, "rb") as file:
                again = self._is_another(file)
                if again:
                    self._forget()
                stat = os.fstat(file.fileno())
                self._inode = (stat.st_dev, stat.st_ino)
                file.seek(self._offset)
                before = len(self._steps) + len(self._broken)
                for line in file:
                    # an unfinished last line is no mistake; without its newline it may yet be whole
                    if not self._take(line, whole=line.endswith(b"\n")):
                        break
                    self._offset += len(line)
                    self._tail = line[-TAIL:]
        except FileNotFoundError:
            was_there = self._inode is not None
            self._forget()
            return was_there
        except OSError as error:
            why = f"cannot be read ({error.strerror or error})"
            raise UserError(shortened(str(self.path)), why=why, fix="make it a file that you may read") from None
        return again or len(self._steps) + len(self._broken) > before

    def _is_another(self, file: BinaryIO) -> bool:
        """Returns whether the file was replaced. Inode numbers of removed files come again, so its tail is compared."""
        if self._inode is None:
            return False
        stat = os.fstat(file.fileno())
        file.seek(self._offset - len(self._tail) if stat.st_size >= self._offset else 0)
        return (stat.st_dev, stat.st_ino) != self._inode or file.read(len(self._tail)) != self._tail

    def _take(self, line: bytes, *, whole: bool) -> bool:
        """Takes a line; returns False for the part of one that cannot be read yet."""
        if line.strip():
            try:
                row = json.loads(line)
                step = _whole_number(row[STEP])
            except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
                if not whole:
                    return False
                self._broken.append(self._lines + 1)
            else:
                self._add(step, row)
        self._lines += whole
        return True

    def _add(self, step: int, row: Mapping[str, Any]) -> None:
        number = len(self._steps)
        self._steps.append(step)
        for name, value in row.items():
            if name == STEP:
                continue
            if isinstance(value, str | list | dict):
                self._not_numbers[name] += 1
                continue
            if name not in self._rows:
                self._rows[name], self._values[name] = array.array("q"), array.array("d")
            self._rows[name].append(number)
            self._values[name].append(_as_float(value))

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def broken(self) -> int:
        """Lines that are no row of metrics."""
        return len(self._broken)

    def table(self) -> Table:
        """Returns what was read so far."""
        steps = numpy.array(self._steps, dtype=numpy.int64)
        order = numpy.argsort(steps, kind="stable")
        last = numpy.append(numpy.diff(steps[order]) > 0, True)[: len(order)]  # for rows of one step the last counts
        place = numpy.full(len(steps), -1)
        place[order[last]] = numpy.arange(last.sum())
        curves = {}
        for name, of_name in self._rows.items():
            places = place[numpy.array(of_name, dtype=numpy.int64)]
            ascending = numpy.argsort(places, kind="stable")
            ascending = ascending[places[ascending] >= 0]
            curves[name] = Curve(places[ascending], numpy.array(self._values[name])[ascending])
        kept = steps[order[last]]
        return Table(kept, curves, self._notes(len(steps) - len(kept), kept, curves))

    def _notes(self, repeated: int, steps: numpy.ndarray, curves: Mapping[str, Curve]) -> list[str]:
        notes = []
        if self._broken:
            lines = _some(self._broken, str)
            what = "line is" if len(self._broken) == 1 else "lines are"
            notes.append(
                f"{self.path.name}: {len(self._broken)} {what} no row of metrics and left out (line {lines})"
            )  # fmt: skip
        if repeated:
            notes.append(f"{self.path.name}: {repeated} rows are of a step that comes again later; the last one counts")
        for name, count in sorted(self._not_numbers.items()):
            notes.append(f"{name}: {count} {'value is' if count == 1 else 'values are'} no number and not shown")
        for name, curve in sorted(curves.items()):
            wrong = steps[curve.rows[~curve.finite]]
            if len(wrong):
                what = "value is" if len(wrong) == 1 else "values are"
                notes.append(f"{name}: {len(wrong)} {what} not finite (step {_some(wrong.tolist(), str)})")
        return notes


def _some(items: list[Any], show: Callable[[Any], str]) -> str:
    more = ", ..." if len(items) > NUMBERS_SHOWN else ""
    return ", ".join(map(show, items[:NUMBERS_SHOWN])) + more


def _whole_number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or abs(value) >= 2**62:
        raise ValueError(f"no number of a step: {value!r}")
    return int(value)


def _as_float(value: Any) -> float:
    """Returns NaN for null, since some write null for a number that is not finite."""
    if value is None:
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
