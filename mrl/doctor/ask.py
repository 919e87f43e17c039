"""Other programs, asked with a limit of time: they may be missing, hang, or end by a signal, and that is an answer."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any


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
