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
import tempfile
from collections.abc import Iterator, Mapping
from typing import IO, Any

END_S = 2.0
"""How long a killed program is waited for: one that sleeps inside a broken driver does not end."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """The output of a program, and its end."""

    code: int | None  # exit code, negative of a signal; None where the time was up
    out: str
    err: str
    limit_s: float

    @property
    def ok(self) -> bool:
        return self.code == 0

    @property
    def ended(self) -> str:
        """How it ended, as the end of a sentence that begins with what was asked."""
        if self.code is None:
            return f"did not end within {self.limit_s:g} s"
        if self.code < 0:
            return f"ended by {signal_name(-self.code)}"
        return f"ended with exit code {self.code}"

    @property
    def said(self) -> str:
        """How it ended, and the last line of what it said about it."""
        lines = [line.strip() for line in (self.err + "\n" + self.out).splitlines() if line.strip()]
        err = [line.strip() for line in self.err.splitlines() if line.strip()]
        last = (err or lines or [""])[-1]
        return f"{self.ended}: {last[:300]}" if last else self.ended


def signal_name(number: int) -> str:
    """Returns a signal's name: `signal_name(11)` is "SIGSEGV"."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def program(*command: str, limit_s: float = 10.0, environment: Mapping[str, str] | None = None) -> Answer | None:
    """Returns a program's answer; None where it is not on the PATH.

    It stays in this process's group, so that Ctrl-C reaches it.
    """
    path = shutil.which(command[0])
    if path is None:
        return None
    with _file() as out, _file() as err:
        try:
            process = subprocess.Popen(
                [path, *command[1:]], stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment
            )
        except OSError as error:  # of another architecture, say
            return Answer(127, "", str(error), limit_s)
        code = _wait(process, limit_s)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="backslashreplace"))
    return Answer(code, texts[0], texts[1], limit_s)


def _file() -> IO[bytes]:
    """Returns a file for a program's output, in memory if the system can: disks may be full."""
    with contextlib.suppress(AttributeError, OSError):
        return os.fdopen(os.memfd_create("mrl doctor"), "w+b")
    return tempfile.TemporaryFile()


def _wait(process: subprocess.Popen, limit_s: float) -> int | None:
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        return None


def json_lines(text: str) -> Iterator[dict[str, Any]]:
    """Yields the objects among the lines: what is loaded as Python starts (sitecustomize.py) may print, too."""
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            if isinstance(entry := json.loads(line), dict):
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
