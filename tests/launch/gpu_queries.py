"""What test_automatic.py has called in processes of their own, which import this module alone."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import time

from mrl.plan.gpus import GPU, GPUS


def fail() -> list[GPU]:
    raise RuntimeError("driver\nlost")


def die() -> list[GPU]:
    os._exit(1)


def hang() -> list[GPU]:
    time.sleep(600)
    return []


def some_gpus() -> list[GPU]:
    """GPUs of a machine: the smaller one has room for some sequences if two ranks share it."""
    return [dataclasses.replace(GPUS["h200"], memory=memory) for memory in (2 * 4_773_000_000, 2**40)]


def note_and_hang(folder: str) -> None:
    pathlib.Path(folder, "pid").write_text(str(os.getpid()))
    time.sleep(600)
