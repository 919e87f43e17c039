"""SIGKILL at a seeded moment of a run that the command line started, found by watching its folder from outside.

A moment is a place in the run (the start-up, a step, a save before and after its marker, the rename, the deletion of
an old checkpoint, the export), the steps that pass before it, a delay, and who is killed. Nothing is in the process, and all
processes or only some are killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import random
import signal
import subprocess
import time
from collections.abc import Callable

import psutil

from tests.resume.runs import TIMEOUT_S, Run

POLL_S = 0.0002
PLACES = ("start-up", "step", "save", "marker", "rename", "delete", "export")
VICTIMS = ("everyone", "launcher", "rank 0", "last rank")


@dataclasses.dataclass(frozen=True)
class Moment:
    """steps: those that pass first, after where the run went on from. delay_s: from the place to the kill."""

    place: str
    victim: str
    steps: int
    delay_s: float


def moments(seed: str, count: int) -> list[Moment]:
    """`count` moments in the order they are used, every other one at a save. An export comes last: the run is over then."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        places = PLACES[2:6] if number % 2 else PLACES
        place = draw.choice(places)
        delay = draw.uniform(0, 4) if place == "start-up" else draw.choice([0.0, draw.uniform(0, 0.03)])
        found.append(Moment(place, draw.choice(VICTIMS), draw.randint(0, 2), delay))
    return sorted(found, key=lambda moment: moment.place == "export")


def kill_at(run: Run, moment: Moment) -> str:
    """Starts the run and kills it. Returns what the moment was, "missed" where the run ended before it came.

    Afterwards no process of the run is left.
    """
    before = _log(run.output)
    process = run.start()
    pids: list[int] = []
    try:
        if not _steps_pass(run, process, moment, before):
            return _ended_first(run, process)
        pids = processes(process.pid)  # before the place comes: looking them up takes longer than a save
        if not _place_comes(run, process, moment.place):
            return _ended_first(run, process)
        time.sleep(moment.delay_s)
        if moment.place == "start-up":
            pids = processes(process.pid)
        _kill(pids, moment.victim)
        code = process.wait(timeout=TIMEOUT_S)
        _check_end(run, code, launcher_died=len(pids) == 1 or moment.victim in ("everyone", "launcher"))
    finally:
        process.kill()
        process.wait()
    assert are_gone(pids), f"{moment}: processes are left"
    return inside(run.output)


def inside(output: pathlib.Path) -> str:
    """Where in its work a killed run was, by what it left behind."""
    if (output / ".tmp-hf").exists():
        return "in an export"
    names = _names(output / "checkpoints")
    partial = [name for name in names if name.startswith(".tmp-")]
    if partial and (output / "checkpoints" / partial[0] / "COMPLETE").exists():
        return "in a save, before the rename"
    if partial:
        return "in a save"
    return "while deleting" if any(name.startswith(".trash-") for name in names) else "between saves"


def processes(launcher: int) -> list[int]:
    """The launcher and its ranks in order."""
    try:
        children = psutil.Process(launcher).children(recursive=True)
    except psutil.NoSuchProcess:
        return [launcher]
    ranks: list[tuple[int, int]] = []
    for child in children:
        try:
            if "mrl.launch.worker" in child.cmdline():
                ranks.append((int(child.environ()["RANK"]), child.pid))
        except (psutil.NoSuchProcess, psutil.ZombieProcess, KeyError):
            continue
    return [launcher, *(pid for _, pid in sorted(ranks))]


def are_gone(pids: list[int], within_s: float = 10.0) -> bool:
    """Whether none of the processes is left, zombies aside, within a time."""
    deadline = time.monotonic() + within_s
    while any(map(_is_running, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> bool:
    """Until the condition holds; False where the process ended first."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if process.poll() is not None:
            return False
        assert time.monotonic() < deadline, "the run hangs"
        time.sleep(POLL_S)
    return True


def _steps_pass(run: Run, process: subprocess.Popen[str], moment: Moment, before: tuple[int, int]) -> bool:
    """Until this start has made the moment's steps; False where it ended first. before: what _log said before it."""
    if moment.place == "start-up":
        return process.poll() is None
    base: list[int] = []

    def passed() -> bool:
        inode, lines = _log(run.output)
        if inode != before[0] and not base:  # this start has opened the log: a resume puts a new file in its place
            base.append(lines if before[0] else 0)
        return bool(base) and (moment.place == "export" or lines > base[0] + moment.steps)

    return wait_for(passed, process)


def _place_comes(run: Run, process: subprocess.Popen[str], place: str) -> bool:
    """Until the next time that what a place leaves on disk is there; False where the run ended first."""
    checkpoints = run.output / "checkpoints"
    names = set(_names(checkpoints))
    conditions: dict[str, Callable[[], bool]] = {
        "start-up": lambda: True,
        "step": lambda: True,
        "save": lambda: any(n.startswith(".tmp-") for n in _names(checkpoints)),
        "marker": lambda: any(n.startswith(".tmp-") and _is_marked(checkpoints / n) for n in _names(checkpoints)),
        "rename": lambda: any(n.startswith("step_") and n not in names for n in _names(checkpoints)),
        "delete": lambda: any(n.startswith(".trash-") for n in _names(checkpoints)),
        "export": (run.output / ".tmp-hf").exists,
    }
    return wait_for(conditions[place], process)


def _ended_first(run: Run, process: subprocess.Popen[str]) -> str:
    assert process.wait(timeout=TIMEOUT_S) == 0, (run.folder / "err").read_text()
    return "missed"


def _log(output: pathlib.Path) -> tuple[int, int]:
    """(inode, lines) of metrics.jsonl; zeros where there is none."""
    path = output / "metrics.jsonl"
    try:
        return path.stat().st_ino, path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0, 0


def _names(folder: pathlib.Path) -> list[str]:
    return os.listdir(folder) if folder.is_dir() else []


def _is_marked(folder: pathlib.Path) -> bool:
    return (folder / "COMPLETE.tmp").exists() or (folder / "COMPLETE").exists()


def _kill(pids: list[int], victim: str) -> None:
    """SIGKILL to the victims among the launcher, which comes first, and its ranks."""
    chosen = {"everyone": pids, "launcher": pids[:1], "rank 0": pids[:2][-1:], "last rank": pids[-1:]}[victim]
    for pid in chosen:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _check_end(run: Run, code: int, *, launcher_died: bool) -> None:
    """A launcher that lived on says which rank was killed, in one line, and exits with 1."""
    said = (run.folder / "err").read_text()
    if launcher_died:
        assert code == -signal.SIGKILL, f"exit code {code}\n{said}"
        return
    assert code == 1 and "was killed by SIGKILL" in said and "Traceback" not in said, f"exit code {code}\n{said}"


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
