"""Runs of `mrl sft` and `mrl dpo` whose pass for a cache ends early, as the ranks of a test world run them."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from mrl.trainers import dpo, teacher
from mrl.trainers.reference import AnswerCache
from mrl.trainers.teacher_cache import TopCache
from tests.trainers.kills import TRAIN


def train(
    config: Mapping[str, Any], command: str, stops_before: int = 0, dies_in_file: int = 0
) -> tuple[tuple[str, str, str], int]:
    """Returns how it ended and what it printed, and for how many batches a frozen model was asked before the first step. Files are written
    after each batch.

    stops_before: SIGTERM comes to the last rank while the batch before it is at work. dies_in_file: SIGKILL to the main
    process when that file is half written.
    """
    module, name = (teacher, "top_by") if command == "sft" else (dpo, "answers_by")
    ask, save, counts = getattr(module, name), torch.save, {"asked": 0, "files": 0}

    def asking(*args: Any, **options: Any) -> Any:
        counts["asked"] += 1
        if counts["asked"] == stops_before - 1 and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return ask(*args, **options)

    def saving(content: Any, path: Any, **options: Any) -> None:
        save(content, path, **options)
        counts["files"] += isinstance(path, pathlib.Path)  # gloo's objects are saved too, to memory
        if counts["files"] == dies_in_file:
            os.truncate(path, os.path.getsize(path) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(module, name, asking))
        if dies_in_file:
            stack.enter_context(mock.patch.object(torch, "save", saving))
        for kind in (AnswerCache, TopCache):
            stack.enter_context(mock.patch.object(kind, "write_every_s", 0.0))
        return TRAIN[command](config), counts["asked"]
