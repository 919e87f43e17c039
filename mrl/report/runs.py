"""Reads the directories of runs, and compares them: keys, versions, git state and command. Nothing is written there."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mrl.config.load import read_yaml
from mrl.config.urls import without_queries
from mrl.errors import UserError, one_line, shortened
from mrl.report.metrics_file import Table, read_table

METRICS, CONFIG, SAMPLES, LOCK, EXPORT = "metrics.jsonl", "config.yaml", "samples", ".lock", "hf"

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


@dataclasses.dataclass(frozen=True)
class RunReader:
    """A run that is read again and again while it goes on."""

    path: pathlib.Path
    name: str

    def run(self) -> Run:
        """Returns the run as it is now."""
        table, settings = read_table(self.path / METRICS), read_settings(self.path / CONFIG)
        last = int(table.steps[-1]) if len(table.steps) else 0
        notes = list(table.notes)
        resume = settings.keys.get("checkpoint.resume")
        if resume not in (None, "auto", "never"):
            notes.append(f"it began from the checkpoint {resume} (checkpoint.resume)")
        if settings.problem is not None:
            notes.append(settings.problem)
        return Run(self.path, self.name, table, settings, state_of(self.path, last, settings.total_steps), notes)


def readers(paths: Sequence[str], *, may_be_empty: bool = False) -> list[RunReader]:
    """Returns a reader for each RUN of the command line. Raises UserError if one is no run.

    may_be_empty: a run that has made no step yet will do.
    """
    whole = [os.path.realpath(path) for path in paths]
    made = [RunReader(pathlib.Path(path), name) for path, name in zip(paths, _names(whole), strict=True)]
    for reader in made:
        if may_be_empty and (reader.path / CONFIG).exists():
            continue
        if not len(reader.run().table.steps):
            why = f"has no {METRICS} with a step"
            fix = "give the output_dir of a run, as in runs/demo, or --watch if it has made no step yet"
            raise UserError(one_line(shortened(str(reader.path))), why=why, fix=fix)
    return made


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


ABSENT = object()
"""Stands where a run has no such key."""

EXPECTED = ("output_dir",)
"""Keys that are different in any two runs."""


@dataclasses.dataclass(frozen=True)
class Differences:
    """Name -> what each run has there, in the order of the runs; ABSENT where it has nothing."""

    runs: Sequence[str]  # names of those that are compared
    keys: Mapping[str, Sequence[Any]]
    versions: Mapping[str, Sequence[Any]]  # packages; and git, command, algorithm, length

    def none_in_words(self, count: int) -> str:
        """Returns the line for `count` runs without differences."""
        if len(self.runs) < 2:
            return "configs and versions are not compared: fewer than two of the runs have a config.yaml to read"
        of = "" if len(self.runs) == count else f" of {', '.join(self.runs)}, which have a config.yaml to read"
        return f"configs, versions and git state are the same{of}"

    def as_json(self, rows: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, Any]]:
        """Returns name -> run -> value, without runs that have none."""
        return {
            name: {run: value for run, value in zip(self.runs, values, strict=True) if value is not ABSENT}
            for name, values in rows.items()
        }


def differences_of(runs: Sequence[Run]) -> Differences:
    """Compares the files as they are, of the runs with a readable config.yaml."""
    readable = [run for run in runs if run.settings.problem is None]
    names = [run.name for run in readable]
    keys = _different([run.settings.keys for run in readable])
    versions = _different([{**run.settings.versions, **run.settings.header} for run in readable])
    return Differences(names, {name: row for name, row in keys.items() if name not in EXPECTED}, versions)


def _different(mappings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    differences = {}
    for name in dict.fromkeys(name for mapping in mappings for name in mapping):
        values = [mapping.get(name, ABSENT) for mapping in mappings]
        if any(repr(value) != repr(values[0]) for value in values):  # 1 and true are not the same
            differences[name] = values
    return dict(sorted(differences.items(), key=lambda row: ABSENT in row[1]))  # keys of all runs come first


def value_text(value: Any) -> str:
    """Returns a config's value on one line, nearly as YAML has it."""
    if value is ABSENT:
        return "-"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
