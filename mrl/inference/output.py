"""Where results go: rows of a file, and words on the terminal, of the main process alone."""

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
    """Gives what writes a row to the file, at once; without a file, and on other ranks, it does nothing. Collective."""
    if path is not None:
        dispatch.on_main(lambda: check_writable(path))
    if path is None or not dispatch.is_main:
        yield lambda row: None
        return
    with open(os.path.expanduser(path), "w", encoding="utf-8") as file:

        def write(row: dict[str, Any]) -> None:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()

        yield write


def check_writable(path: str, key: str = "--out") -> None:
    """Raises ConfigError where the file cannot be written. What it holds stays."""
    file = os.path.expanduser(path)
    was_there = os.path.exists(file)
    try:
        with open(file, "a", encoding="utf-8"):
            pass
    except OSError as error:
        why = f"cannot be written ({error.strerror})"
        raise ConfigError(key, quoted(path), why, "give a file in a folder that is there") from None
    if not was_there:
        os.unlink(file)
