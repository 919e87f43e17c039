"""Imports packages in a process of its own, and reads from what it printed which one it ended in."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from mrl.doctor.ask import Answer, json_lines, python

LIMIT_S = 120.0
"""Longest time of one import. Those of torch and vLLM take a minute where many nodes read them from one file server."""

START_S = 30.0
"""What Python itself may take to start, on top."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A package that is imported, or what is asked of one."""

    name: str
    modules: Sequence[str] = ()
    needs: str | None = None  # an earlier step without which this one is not tried


@dataclasses.dataclass(frozen=True)
class ImportResult:
    """The outcome of one step."""

    error: str | None = None  # in words; None where it went well
    ends_process: bool = False  # the import kills the process that does it, or never returns
    blocked_by: str | None = None  # the step that it needs, which went wrong; it was not tried
    version: str | None = None
    file: str | None = None
    is_package: bool = True  # not a mere folder of that name
    seconds: float = 0.0
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def works(self) -> bool:
        return self.error is None and self.blocked_by is None


def is_found(module: str) -> bool:
    """Returns whether Python finds a module of that name; it is not imported for it."""
    try:
        return importlib.util.find_spec(module) is not None
    except Exception:  # finders that packages install raise what they like
        return False


def imports(steps: Sequence[Step], *, limit_s: float = LIMIT_S) -> dict[str, ImportResult]:
    """Returns the result of each step. If a package ends the process, another process continues after it.

    limit_s: of one step.
    """
    done: dict[str, ImportResult] = {}
    hidden: list[str] = []  # packages that ended a process: who imports them next would end, too
    while left := [step for step in steps if step.name not in done]:
        request = {
            "steps": [dataclasses.asdict(step) for step in left],
            "failed": [name for name, result in done.items() if not result.works],
            "hidden": hidden,
            "limit_s": limit_s,
        }
        answer = python("-m", "mrl.doctor.probe", json.dumps(request), limit_s=START_S + limit_s * len(left))
        begun, names = None, [step.name for step in left]
        for entry in json_lines(answer.out):
            if entry.get("begun") in names:
                begun = entry["begun"]
            elif entry.get("name") in names:  # what runs as Python starts may print objects of its own
                begun, name = None, entry.pop("name")
                done[name] = ImportResult(**entry)
        if begun is not None:
            done[begun] = ImportResult(error=ended(answer, limit_s), ends_process=True)
            hidden += [module.partition(".")[0] for step in left if step.name == begun for module in step.modules[:1]]
        elif answer.code is None or left[0].name not in done:
            error = f"Python does not start for it ({answer.said})"
            done |= {step.name: ImportResult(error=error) for step in left if step.name not in done}
    return done


def ended(answer: Answer, limit_s: float) -> str:
    """Returns in words how an import ended the process that tried it."""
    if answer.code is None or answer.code == -signal.SIGALRM:
        return f"its import is not done after {limit_s:g} s"
    words = re.sub(r"(?s)Fatal Python error.*|Current thread.*", "", answer.err).strip().splitlines()
    last = f": {words[-1].strip()[:200]}" if words else ""
    return f"its import ends the process ({answer.ended}{last})"


HINTS: Sequence[tuple[str, str]] = (
    (
        r"libcud\w+\.so|libcublas|libcudnn|libnccl|libnvrtc|libcufft|libnvJitLink",
        "it is built for another CUDA than is here",
    ),
    (r"undefined symbol|symbol not found", "it is built for another version of what it links to, mostly torch"),
    (
        r"GLIBCXX_|CXXABI_",
        "the C++ library that is found first is too old for it (LD_LIBRARY_PATH, conda's libstdcxx-ng)",
    ),
    (
        r"_ARRAY_API|numpy\.core\.multiarray|numpy\.dtype size changed|compiled using NumPy",
        "it is built for another numpy",
    ),
    (r"cannot open shared object file", "a library that it links to is missing"),
    (
        r"partially initialized module|circular import",
        "a file or folder of yours has a package's name and is found first",
    ),
    (r"No module named", "a package that it needs is missing, or it is installed in part"),
)
"""What an error of an import mostly means, by a text in it."""


def hint(error: str) -> str:
    """Returns the likely meaning of an error, to append to a line; empty if it is not known."""
    return next((f"; {meaning}" for pattern, meaning in HINTS if re.search(pattern, error)), "")
