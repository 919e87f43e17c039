"""The output of results: rows of a file, and words on the terminal, from the main process alone."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from mrl.engine.collective import is_main
from mrl.errors import ConfigError, quoted
from mrl.roles.dispatch import WorkerDispatch
from mrl.trainers.console import Console, PlainConsole
from mrl.trainers.waits import write_error_line


def open_console() -> Console:
    """Returns a console on stderr: stdout has nothing but results."""
    return PlainConsole(write_error_line) if is_main() else Console()


@contextlib.contextmanager
def writing(path: str | None, dispatch: WorkerDispatch) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Gives a function that writes a row to the file at once. Without a file, and on other ranks, it does nothing."""
    if path is None or not dispatch.is_main:
        yield lambda row: None
        return
    with _refused(path):  # the folder may have gone since `check_writable`
        opened = open(os.path.expanduser(path), "w", encoding="utf-8")  # noqa: SIM115

    def write(row: dict[str, Any]) -> None:
        with _refused(path):
            opened.write(json.dumps(row, ensure_ascii=False) + "\n")
            opened.flush()

    try:
        yield write
    finally:
        with _refused(path):  # it writes what a full disk did not take
            opened.close()


def write_whole(result: dict[str, Any], path: str) -> None:
    """Writes a result, whole or not at all; into a pipe or a device as it comes."""
    file = os.path.expanduser(path)
    is_plain = not file.startswith("/dev/") and (os.path.isfile(file) or not os.path.exists(file))
    file = os.path.realpath(file) if is_plain else file
    part = f"{file}.part" if is_plain else file
    with _refused(path):
        with open(part, "w", encoding="utf-8") as out:
            json.dump(result, out, ensure_ascii=False, indent=1)
            out.write("\n")
        if is_plain:
            os.replace(part, file)


def check_writable(path: str) -> None:
    """Raises ConfigError if the folder of --out is not there, or its file cannot be written. Its content stays."""
    file = os.path.expanduser(path)
    folder = os.path.dirname(os.path.realpath(file))
    if os.path.isdir(file) or not os.access(file if os.path.exists(file) else folder, os.W_OK):
        raise ConfigError("--out", quoted(path), "cannot be written", "give a file in a folder that is there")


@contextlib.contextmanager
def _refused(path: str) -> Iterator[None]:
    """Turns an error of writing the file of --out into the user's line, inside the context."""
    try:
        yield
    except OSError as error:
        why = f"cannot be written ({error.strerror})"
        raise ConfigError("--out", quoted(path), why, "give a file in a folder that is there, with room") from None
