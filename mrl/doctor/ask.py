"""Other programs, asked with a limit of time: they may be missing, hang, or end by a signal, and that is an answer.

Packages are imported so, each in a process of its own, which it may end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

LIMIT_S = 150.0
"""Longest time of one import. Those of torch and vLLM take a minute where many nodes read them from one file server."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """The output of a program, and its end."""

    code: int | None  # exit code, negative of a signal; None where the time was up
    out: str
    err: str
    limit_s: float

    @property
    def ended(self) -> str:
        """Returns how it ended and the last line that it printed, to append to the name of what was asked."""
        if self.code is None:
            end = f"did not end within {self.limit_s:g} s"
        elif self.code < 0:
            end = f"ended by {signal.Signals(-self.code).name}"
        else:
            end = f"ended with exit code {self.code}"
        lines = (self.err.strip() or self.out.strip()).splitlines()
        return f"{end}: {lines[-1].strip()[:300]}" if lines else end


def program(*command: str, limit_s: float = 10.0, environment: Mapping[str, str] | None = None) -> Answer | None:
    """Returns a program's answer; None where it is not on the PATH.

    It stays in this process's group, so that Ctrl-C reaches it.
    """
    path = shutil.which(command[0])
    if path is None:
        return None
    try:
        process = subprocess.Popen(
            [path, *command[1:]], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environment,
        )  # fmt: skip
    except OSError as error:  # of another architecture, say
        return Answer(127, "", str(error), limit_s)
    code: int | None = None
    try:
        out, err = process.communicate(timeout=limit_s)
        code = process.returncode
    except subprocess.TimeoutExpired as expired:
        process.kill()  # without a wait for its end: one that sleeps inside a broken driver has none
        out, err = expired.stdout or b"", expired.stderr or b""
    return Answer(code, out.decode(errors="backslashreplace"), err.decode(errors="backslashreplace"), limit_s)


def json_lines(text: str) -> Iterator[dict[str, Any]]:
    """Yields the objects among the lines: what is loaded as Python starts (sitecustomize.py) may print, too."""
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict):
                yield entry


def python(*arguments: str, limit_s: float, variables: Mapping[str, str] | None = None) -> Answer:
    """Runs this Python, with the import path of this process, which may be more than its environment says.

    -P: the folder of the script, or the current one, is no part of the import path by itself.
    """
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    environment = {**os.environ, "PYTHONPATH": path, **(variables or {})}
    answer = program(sys.executable, "-P", *arguments, limit_s=limit_s, environment=environment)
    assert answer is not None, sys.executable
    return answer


@dataclasses.dataclass(frozen=True)
class ImportResult:
    """The outcome of an import."""

    error: str | None = None  # in words; None where it went well
    version: str | None = None
    facts: Mapping[str, Any] | None = None  # of probe.py; None of other packages, or where torch did not answer

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
