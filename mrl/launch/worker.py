"""One rank that `mrl.launch.local` started: runs the target and leaves its outcome in a file.

`python -m mrl.launch.worker FOLDER` runs the task in FOLDER/task.json. Python's output on rank 0 goes to the terminal.
Other ranks, and C++ libraries on rank 0, write to a log each. An error is not printed here: the launcher shows the
first one, once.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import faulthandler
import json
import os
import pathlib
import pkgutil
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from typing import Any, Literal, NoReturn

from mrl.config.build import build_section
from mrl.errors import Stopped, UserError
from mrl.trainers import signals
from mrl.trainers.waits import announce

_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class Task:
    """The work that every rank does."""

    target: str  # `module:function`, called as `function(config, command_line)`
    root: str  # of `config`, as `module:Class`
    config: dict[str, Any]  # as plain data
    command_line: str
    quiet: bool  # rank 0 does not say that it loads
    log_dir: str
    launcher_pid: int


Ending = Literal["done", "stopped", "user", "fault", "interrupted"]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a rank ended."""

    rank: int
    kind: Ending
    text: str  # of "user" the message of a UserError, of "fault" the traceback of any other error
    time: float


def run_task(task: Task, rank: int) -> Outcome:
    """Runs the target in this process; never raises."""
    kind: Ending = "done"
    text = ""
    signals.ignore_after_stop()
    try:
        with warnings_in(log_path(task.log_dir, rank)):
            config = config_of(task)
            with announce("loading PyTorch and Megatron", shows=rank == 0 and not task.quiet):
                run = pkgutil.resolve_name(task.target)
            run(config, task.command_line)
    except Stopped as stop:
        kind, text = "stopped", str(stop)
    except UserError as error:
        kind, text = "user", str(error)
    except KeyboardInterrupt:
        kind = "interrupted"
    except BaseException:
        kind, text = "fault", traceback.format_exc()
    return Outcome(rank, kind, text, time.time())


def config_of(task: Task) -> Any:
    """Returns the config of a task; the launcher has checked its keys against each other."""
    root = pkgutil.resolve_name(task.root)
    return build_section(root, task.config, "", root)


def write_outcome(folder: pathlib.Path, outcome: Outcome) -> None:
    """Writes the outcome whole or not at all, so that the launcher never reads half a file."""
    partial = folder / f"outcome_{outcome.rank}.partial"
    partial.write_text(json.dumps(dataclasses.asdict(outcome)), encoding="utf-8")
    partial.rename(folder / f"outcome_{outcome.rank}.json")


def read_outcomes(folder: pathlib.Path) -> list[Outcome]:
    """Returns the outcomes written so far, the earliest first."""
    outcomes = [Outcome(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("outcome_*.json")]
    return sorted(outcomes, key=lambda outcome: outcome.time)


def log_path(log_dir: str | pathlib.Path, rank: int) -> pathlib.Path:
    return pathlib.Path(log_dir) / f"rank_{rank}.log"


@contextlib.contextmanager
def warnings_in(path: pathlib.Path) -> Iterator[None]:
    """Appends Python warnings inside to a file. Libraries write them for developers, not for users of a run."""

    def write(
        message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: str | None = None
    ) -> None:
        with contextlib.suppress(OSError):  # the run itself meets a full disk, and says so
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as log:
                log.write(warnings.formatwarning(message, category, filename, lineno, line))

    with warnings.catch_warnings():
        warnings.showwarning = write
        yield


def die_with_launcher(launcher_pid: int) -> None:
    """Asks the kernel to kill this process when the launcher dies, even by SIGKILL; elsewhere a thread watches."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch_parent, args=(launcher_pid,), daemon=True).start()
    if os.getppid() != launcher_pid:
        os._exit(1)


def _watch_parent(launcher_pid: int) -> None:
    while os.getppid() == launcher_pid:
        time.sleep(0.5)
    os._exit(1)


def _redirect_output(path: pathlib.Path, *, keep_terminal: bool) -> None:
    """Sends what this process prints to the end of a file; `keep_terminal` spares sys.stdout and sys.stderr."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    if keep_terminal:
        sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, encoding=sys.stderr.encoding, errors=sys.stderr.errors)
    else:
        os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    task = Task(**json.loads((folder / "task.json").read_text(encoding="utf-8")))
    rank = int(os.environ["RANK"])
    die_with_launcher(task.launcher_pid)
    _redirect_output(log_path(task.log_dir, rank), keep_terminal=rank == 0)
    faulthandler.enable(2)  # a crash in a C++ library leaves the Python lines that called it in the log
    outcome = run_task(task, rank)
    if outcome.kind == "fault":
        with log_path(task.log_dir, rank).open("a", encoding="utf-8") as log:
            log.write(outcome.text)
    write_outcome(folder, outcome)
    failed = outcome.kind in ("user", "fault", "interrupted")
    leave(1 if failed else 0, failed=failed)


def leave(code: int, *, failed: bool) -> NoReturn:
    """Ends a process with PyTorch in it. failed: its peers may be gone.

    The interpreter's own exit takes C++ libraries down while their threads run. This has aborted a finished run, with
    "terminate called without an active exception" and exit code -6.
    """
    if not failed:
        atexit._run_exitfuncs()  # after a failure they may wait for process groups whose peers are gone
    with contextlib.suppress(BrokenPipeError):  # as of `mrl ... | head`
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
