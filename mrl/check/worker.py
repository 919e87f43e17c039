"""Runs a rank of a check, for `mrl.launch.local.launch`."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path

import torch

from mrl.check import measure
from mrl.config.schema import REQUIRED, key


@dataclasses.dataclass(frozen=True)
class Task:
    """Holds layouts on one number of processes, one after the other."""

    folder: str = key(REQUIRED, "where the work lies, and what comes of it is left")
    numbers: tuple[int, ...] = key((), "of the layouts")


def work_file(folder: str, number: int) -> Path:
    return Path(folder, f"work-{number}.pt")


def result_file(folder: str, number: int) -> Path:
    return Path(folder, f"result-{number}.pt")


def run(task: Task, command_line: str) -> None:
    """Runs the layouts on every rank."""
    for number in task.numbers:
        file = work_file(task.folder, number)
        work: measure.LayoutWork = torch.load(file, weights_only=False)  # made by this command
        if work.writes:
            measure.write(work)
        elif (found := measure.measure(work)) is not None:
            torch.save(found, result_file(task.folder, number))
        gc.collect()
