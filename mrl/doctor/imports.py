"""Imports each package in a process of its own, which it may end."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
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
    try:
        return importlib.util.find_spec(module) is not None
    except Exception:  # finders that packages install raise what they like
        return False


def load(name: str, modules: Sequence[str], limit_s: float = LIMIT_S) -> ImportResult:
    """Imports a package's modules as probe.py does."""
    answer = python("-m", "mrl.doctor.probe", name, *modules, limit_s=limit_s)
    found: dict[str, Any] = {}
    for entry in json_lines(answer.out):
        found |= {key: value for key, value in entry.items() if key in ("error", "version", "facts")}
    return ImportResult(**found) if found else ImportResult(f"its import {answer.ended}")


HINTS: Sequence[tuple[str, str]] = (
    (
        r"libcud\w+\.so|libcublas|libcudnn|libnccl|libnvrtc|libcufft|libnvJitLink",
        "it is built for another CUDA than is here",
    ),
    (r"undefined symbol|symbol not found", "it is built for another version of what it links to, mostly torch"),
    (
        r"_ARRAY_API|numpy\.core\.multiarray|numpy\.dtype size changed|compiled using NumPy",
        "it is built for another numpy",
    ),
    (r"cannot open shared object file", "a library that it links to is missing"),
    (r"No module named", "a package that it needs is missing, or it is installed in part"),
)
"""What an error of an import mostly means, by a text in it."""


def failure(error: str) -> str:
    """Returns what an error of an import says and mostly means, to append to a package's name."""
    meaning = next((f"; {means}" for text, means in HINTS if re.search(text, error)), "")
    return f"does not load ({error}){meaning}"
