"""Findings of the doctor, with a level and in sections."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mrl.errors import one_line

Level = Literal["ok", "note", "warning", "fault"]
"""note: good to know, nothing to do. warning: something is slower, or fails in some runs. fault: a run stops, or leaves
GPUs that are here unused."""

LEVELS: Sequence[Level] = ("ok", "note", "warning", "fault")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str  # for scripts, as in "disk.tmp"; unique among the findings of a machine
    level: Level
    what: str  # a line: what it is, and what that costs
    fix: str = ""  # what to do; a warning and a fault always have it
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the numbers behind the line, as JSON

    def __post_init__(self) -> None:
        assert self.level in LEVELS, self.level
        assert self.fix or self.level in ("ok", "note"), f"{self.name}: a {self.level} says what to do"
        object.__setattr__(self, "what", one_line(self.what))
        object.__setattr__(self, "fix", one_line(self.fix))


def ok(name: str, what: str, **data: Any) -> Finding:
    return Finding(name, "ok", what, data=data)


def note(name: str, what: str, **data: Any) -> Finding:
    return Finding(name, "note", what, data=data)


def warning(name: str, what: str, fix: str, **data: Any) -> Finding:
    return Finding(name, "warning", what, fix, data)


def fault(name: str, what: str, fix: str, **data: Any) -> Finding:
    return Finding(name, "fault", what, fix, data)


@dataclasses.dataclass(frozen=True)
class Section:
    """Findings of one subject."""

    title: str
    findings: Sequence[Finding]
    table: Sequence[Sequence[str]] = ()  # shown above the findings; the first row has the names of columns


def gib(size: float) -> str:
    """Returns bytes as people read them."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if size >= scale:
            number = size / scale
            return f"{number:.1f} {unit}" if number < 10 else f"{number:.0f} {unit}"
    return f"{size / 1024:.0f} KiB"
