"""Reads a run's directory; nothing is written there."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy

from mrl.config.load import read_yaml
from mrl.config.urls import without_queries
from mrl.errors import UserError, one_line, shortened
from mrl.report.metrics_file import MetricsFile, Table

METRICS, CONFIG, SAMPLES, LOCK, EXPORT = "metrics.jsonl", "config.yaml", "samples", ".lock", "hf"
MEMORY = "perf/memory_gb"
RUNS_NAMED = 4
"""Runs that a message lists if a folder of runs was named for a run."""

State = Literal["running", "finished", "not running"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The content of config.yaml: the keys, and the lines of comments above them."""

    keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # dotted name -> value
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)  # mrl, Python and packages
    header: Mapping[str, str] = dataclasses.field(default_factory=dict)  # git, command, algorithm, length
    problem: str | None = None  # why the file cannot be read

    @property
    def total_steps(self) -> int | None:
        """The steps that the run is to make; None if the file does not say."""
        match = re.match(r"(\d+) steps", self.header.get("length", ""))
        if match is not None:
            return int(match[1])
        steps = self.keys.get("train.steps")
        return steps if isinstance(steps, int) else None


@dataclasses.dataclass(frozen=True)
class Run:
    """The content of one directory when it was read."""

    path: pathlib.Path
    name: str  # in legends and tables; of several runs no two have the same
    table: Table
    settings: Settings
    state: State
    notes: Sequence[str]

    @property
    def last_step(self) -> int:
        return int(self.table.steps[-1]) if len(self.table.steps) else 0

    @property
    def progress(self) -> str:
        """How far it is, in words."""
        total = self.settings.total_steps
        of = f" of {total:,}" if total is not None else ""
        return f"step {self.last_step:,}{of}, {self.state}"


class RunReader:
    """A run that is read again and again while it goes on."""

    def __init__(self, path: pathlib.Path, name: str) -> None:
        self.path, self.name = path, name
        self._metrics = MetricsFile(path / METRICS)

    def read(self) -> bool:
        """Returns whether metrics.jsonl has something new."""
        return self._metrics.read()

    @property
    def rows(self) -> int:
        """Rows of metrics that were read."""
        return len(self._metrics)

    @property
    def broken(self) -> int:
        """Lines of metrics.jsonl that are none."""
        return self._metrics.broken

    def run(self) -> Run:
        """Returns the run as far as it was read."""
        table, settings = self._metrics.table(), read_settings(self.path / CONFIG)
        last = int(table.steps[-1]) if len(table.steps) else 0
        notes = [*table.notes, *_starts(table, settings)]
        if settings.problem is not None:
            notes.append(settings.problem)
        return Run(self.path, self.name, table, settings, state_of(self.path, last, settings.total_steps), notes)


def readers(paths: Sequence[str], *, may_be_empty: bool = False) -> list[RunReader]:
    """Returns a reader for each RUN of the command line. Raises UserError if one is no run.

    may_be_empty: a run that has made no step yet will do.
    """
    found = [pathlib.Path(path) for path in paths]
    for path in found:
        check_run(path, may_be_empty=may_be_empty)
    whole = [os.path.realpath(path) for path in found]
    for path, real in zip(found, whole, strict=True):
        if whole.count(real) > 1:
            raise UserError(shortened(str(path)), why="is named twice", fix="name each run once")
    made = [RunReader(path, name) for path, name in zip(found, _names(whole), strict=True)]
    for reader in made:
        reader.read()
        if not reader.rows and not may_be_empty:
            why = f"{METRICS} has no step yet"
            if reader.broken:
                why = f"no line of {METRICS} is a row of metrics (an object with a step)"
            raise UserError(shortened(str(reader.path)), why=why, fix="wait for its first step, or give --watch")
    return made


def check_run(path: pathlib.Path, *, may_be_empty: bool = False) -> None:
    """Raises UserError if `path` is not the directory of a run; it says what to name instead."""
    name = one_line(shortened(str(path)))
    try:
        exists = path.exists()
    except (OSError, ValueError) as error:  # too long, a null byte, a folder that may not be entered
        why = f"is no path that can be looked at ({getattr(error, 'strerror', None) or error})"
        raise UserError(name, why=why, fix="give the output_dir of a run, as in runs/demo") from None
    if not exists:
        raise UserError(name, why="there is no such folder", fix="give the output_dir of a run, as in runs/demo")
    above = next((folder for folder in path.resolve().parents if (folder / METRICS).exists()), None)
    if above is not None and not (path / METRICS).exists():
        what = "is a file" if path.is_file() else "is a folder"
        raise UserError(name, why=f"{what} of the run in {above}", fix=f"give {_as_given(path, above)}")
    if path.is_file():
        raise UserError(name, why="is a file", fix="give the output_dir of a run, a folder with metrics.jsonl")
    if (path / METRICS).exists():
        return
    if (path / CONFIG).exists():
        if may_be_empty:
            return
        raise UserError(name, why=f"has no {METRICS}: that run has made no step", fix="wait for one, or give --watch")
    inside = sorted(file.parent for file in path.glob(f"*/{METRICS}"))
    if inside:
        more = "" if len(inside) <= RUNS_NAMED else f" (and {len(inside) - RUNS_NAMED} more)"
        some = " ".join(str(folder) for folder in inside[:RUNS_NAMED])
        what = "a run is" if len(inside) == 1 else f"{len(inside)} runs are"
        raise UserError(name, why=f"is no run; {what} in it", fix=f"give {some}{more}")
    if (path / "config.json").exists():
        raise UserError(name, why="is a folder of a model", fix=f"give the output_dir of a run, which has {METRICS}")
    raise UserError(name, why=f"has no {METRICS}", fix="give the output_dir of a run, as in runs/demo")


def _as_given(path: pathlib.Path, above: pathlib.Path) -> str:
    """Returns `above`, a parent of `path`, as the user would write it."""
    return next((str(p) for p in path.parents if os.path.realpath(p) == str(above)), str(above))


def _names(paths: Sequence[str]) -> list[str]:
    """Returns the ends of different paths, as long as it takes to tell them apart."""
    parts = [pathlib.PurePath(path).parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return list(paths)


def read_settings(path: pathlib.Path) -> Settings:
    """Returns the content of config.yaml. If it is missing or cannot be read, `problem` says so."""
    if not path.exists():
        return Settings(problem=f"{path.name} is not there: no versions, keys and length of the run")
    try:
        keys = flatten(without_queries(read_yaml(path)))
    except UserError as error:
        return Settings(problem=str(error))
    header: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.startswith("#"):
            break
        name, colon, text = line.lstrip("# ").partition(": ")
        if colon and not name.startswith("Written by"):
            header[name] = text
    versions = dict(word.rsplit(" ", 1) for word in header.pop("versions", "").split(", ") if " " in word)
    return Settings(keys, versions, header)


def flatten(mapping: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Returns the values of nested mappings by their dotted names."""
    flat: dict[str, Any] = {}
    for name, value in mapping.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{above}{name}.")
        else:
            flat[f"{above}{name}"] = value
    return flat


def state_of(path: pathlib.Path, last_step: int, total_steps: int | None) -> State:
    """Returns whether a process holds the run's lock; if nobody does, whether all steps are made."""
    if is_locked(path / LOCK):
        return "running"
    if total_steps is None:
        return "finished" if (path / EXPORT).exists() else "not running"
    return "finished" if last_step >= total_steps else "not running"


def is_locked(path: pathlib.Path) -> bool:
    """Returns whether a run holds its lock (`mrl.trainers.run_lock`). On storage without locks nobody does."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # closing gives it back; a run that starts tries again
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False


def _starts(table: Table, settings: Settings) -> list[str]:
    """Returns notes on later starts of the run, as far as its files show them.

    Nothing is written for the purpose, because a resumed run equals one that was not stopped.
    """
    notes = []
    resume = settings.keys.get("checkpoint.resume")
    if resume not in (None, "auto", "never"):
        notes.append(f"it began from the checkpoint {resume} (checkpoint.resume)")
    if len(table.steps) and table.steps[0] > 1:
        notes.append(f"{METRICS} begins with step {table.steps[0]}: the run went on here from a checkpoint")
    steps = restarts(table)
    if steps:
        shown = ", ".join(map(str, steps[:10])) + (", ..." if len(steps) > 10 else "")
        notes.append(f"started again before step {shown} (seen by the peak memory, which begins anew with a process)")
    return notes


def restarts(table: Table) -> list[int]:
    """Returns steps before which another process began: the peak memory of one never falls.

    Starts whose memory was higher at once are not found.
    """
    curve = table.curves.get(MEMORY)
    if curve is None:
        return []
    falls = numpy.flatnonzero(numpy.diff(curve.values) < 0) + 1
    return [int(step) for step in table.steps[curve.rows[falls]]]
