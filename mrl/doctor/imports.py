"""Imports each package in a process of its own, which it may end."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from mrl.doctor.ask import json_lines, python

LIMIT_S = 150.0
"""Longest time of one import. Those of torch and vLLM take a minute where many nodes read them from one file server."""


@dataclasses.dataclass(frozen=True)
class ImportResult:
    """The outcome of an import."""

    error: str | None = None  # in words; None where it went well
    version: str | None = None
    facts: Mapping[str, Any] | None = None  # of torch_facts.py; None of other packages, or where torch did not answer

    @property
    def works(self) -> bool:
        return self.error is None


def is_found(module: str) -> bool:
    """Returns whether Python finds a module of that name; it is not imported for it."""
    return importlib.util.find_spec(module) is not None


def load(name: str, modules: Sequence[str], limit_s: float = LIMIT_S) -> ImportResult:
    """Imports a package's modules as probe.py does."""
    answer = python("-m", "mrl.doctor.probe", name, *modules, limit_s=limit_s)
    found: dict[str, Any] = {}
    for entry in json_lines(answer.out):
        found |= {key: value for key, value in entry.items() if key in ("error", "version", "facts")}
    return ImportResult(**found) if found else ImportResult(f"its import {answer.ended}")


def failure(error: str) -> str:
    """Returns what an error of an import says, to append to a package's name."""
    return f"does not load ({error})"
