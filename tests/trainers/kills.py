"""Runs the trainer and kills it at its n-th event: a step, a line of metrics, or a change of the file system.

Events are calls on one rank, in the main thread, of what a run does to disk and of the steps between, so that every
place where a kill could leave something half done is one of them, those inside a save and an export among them.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from mrl.data.batches import BatchSource
from mrl.engine.megatron import dist_checkpoint
from mrl.metrics import MetricsLog
from mrl.trainers.caches import RowCache
from mrl.trainers.trainer import Trainer
from tests.trainers import cases, dpo_cases, rm_cases
from tests.trainers.cases import before

EVENTS = (
    (BatchSource, "next"), (Trainer, "save"), (MetricsLog, "write"), (MetricsLog, "sync"), (torch, "save"), (dcp, "save"),
    (dist_checkpoint, "write"), (os, "fsync"), (os, "replace"), (os, "rename"), (os, "mkdir"), (os, "makedirs"),
    (shutil, "rmtree"),
)  # fmt: skip


TRAIN = {"sft": cases.train, "dpo": dpo_cases.train, "rm": rm_cases.train}


def count(config: Mapping[str, Any], rank: int, command: str) -> int:
    """Events of a whole run on `rank`."""
    seen: list[str] = []
    with each_event(rank, lambda name: seen.append(name)):
        assert TRAIN[command](config)[:2] == ("done", "")
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, len(seen))
    return counts[rank]


def train_until(config: Mapping[str, Any], event: int, rank: int, killed: str, command: str) -> None:
    """SIGKILL to `rank` as its event number `event` begins; the file `killed` says that it came to that."""
    left = [event]

    def step(name: str) -> None:
        left[0] -= 1
        if left[0] < 0:
            pathlib.Path(killed).write_text(name)
            os.kill(os.getpid(), signal.SIGKILL)

    with each_event(rank, step):
        TRAIN[command](config)


@contextlib.contextmanager
def each_event(rank: int, call: Callable[[str], None]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            mock.patch.object(RowCache, "write_every_s", 0.0)
        )  # a file for each batch of the pass before the first step
        for owner, name in EVENTS if dist.get_rank() == rank else ():

            def note(*_: Any, name: str = name, **__: Any) -> None:
                if threading.current_thread() is threading.main_thread():
                    call(name)

            stack.enter_context(before(owner, name, note))
        yield
