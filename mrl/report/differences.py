"""The differences between runs: keys of their configs, versions, git state and command."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mrl.report.runs import Run

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
