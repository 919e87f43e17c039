"""What the launched ranks run in test_local.py. Each is `function(config, command_line)`; config.output_dir is scratch."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time
import warnings

from mrl.config.schema import REQUIRED, key
from mrl.errors import DataError, Stopped
from mrl.trainers.signals import StopSignal


@dataclasses.dataclass(frozen=True)
class Notes:
    """The config of a command that does not train."""

    output_dir: str = key(REQUIRED, "the folder of the notes")
    words: tuple[str, ...] = key((), "what each rank notes")


RANK = int(os.environ.get("RANK", "0"))


def _note(config, name: str, text: str) -> None:
    folder = pathlib.Path(config.output_dir) / "notes"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}_{RANK}").write_text(text)


def _forever(config) -> None:
    """Says that it runs, with its process id, and that of a child that would run on without it."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    _note(config, "pid", f"{os.getpid()} {child.pid}")
    while True:
        time.sleep(0.05)


def environment(config, command_line: str) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    _note(config, "env", " ".join([*(os.environ.get(name, "-") for name in names), command_line]))
    print(f"printed by rank {RANK}")
    warnings.warn(f"a library warns rank {RANK}", stacklevel=1)


def words(config, command_line: str) -> None:
    _note(config, "words", f"{config.words} {command_line}")


def user_error_on_rank_1(config, command_line: str) -> None:
    if RANK == 1:
        raise DataError("rows.jsonl:3: is not an object; give one JSON object a line")
    _forever(config)


def fault_on_rank_1(config, command_line: str) -> None:
    """Rank 1 fails in the middle of a collective; the others see its connection close."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if RANK == 1:
        raise ZeroDivisionError("the one true error")
    dist.all_reduce(torch.ones(1))


def killed_on_rank_1(config, command_line: str) -> None:
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _forever(config)


def crashes_on_rank_1(config, command_line: str) -> None:
    if RANK == 1:
        ctypes.string_at(0)
    _forever(config)


def ignore_terminate_after_failure(config, command_line: str) -> None:
    if RANK == 1:
        raise ZeroDivisionError("the one true error")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _forever(config)


def stop_when_hurried(config, command_line: str) -> None:
    """As a trainer that waits for a rollout does, and saves at the second signal. It takes long to end."""
    with StopSignal() as stop:
        _note(config, "pid", f"{os.getpid()} {os.getpid()}")
        while not stop.hurried:
            time.sleep(0.02)
    _note(config, "saved", str(stop.name))
    time.sleep(1.0)  # another one comes
    raise Stopped("stopped after step 3; run the same command again to go on")


def wait_forever(config, command_line: str) -> None:
    _forever(config)
