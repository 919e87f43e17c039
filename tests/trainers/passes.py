"""Runs of `mrl sft` and `mrl dpo` whose pass for a cache ends early, as the ranks of a test world run them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch.distributed as dist

from mrl.trainers import dpo, teacher
from mrl.trainers.caches import RowCache
from mrl.weights import pt_file
from tests.trainers import cases, dpo_cases

TRAIN = {"sft": cases.train, "dpo": dpo_cases.train}


def train(
    config: Mapping[str, Any], command: str, stops_before: int = 0, dies_in_file: int = 0
) -> tuple[tuple[str, str, str], int]:
    """Returns how it ended and what it printed, and for how many batches a frozen model was asked before the first step. Files are written
    after each batch.

    stops_before: SIGTERM comes to the last rank while the batch before it is at work. dies_in_file: SIGKILL to the main
    process when that file is half written.
    """
    module, name = (teacher, "top_by") if command == "sft" else (dpo, "answers_by")
    ask, seal, counts = getattr(module, name), pt_file._Stream.finish, {"asked": 0, "files": 0}

    def asking(*args: Any, **options: Any) -> Any:
        counts["asked"] += 1
        if counts["asked"] == stops_before - 1 and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return ask(*args, **options)

    def sealing(stream: pt_file._Stream) -> None:
        counts["files"] += 1
        if counts["files"] == dies_in_file:
            os.truncate(stream._out.fileno(), stream._out.tell() // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        seal(stream)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(module, name, asking))
        if dies_in_file:
            stack.enter_context(mock.patch.object(pt_file._Stream, "finish", sealing))
        stack.enter_context(mock.patch.object(RowCache, "write_every_s", 0.0))
        return TRAIN[command](config), counts["asked"]
