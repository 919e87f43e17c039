"""Runs of `mrl sft` and `mrl dpo` whose pass for a cache ends early, as the ranks of a test world run them."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import types
from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from mrl.batch import Batch, make_batch
from mrl.engine import collective
from mrl.errors import CheckpointError
from mrl.trainers import caches, dpo, teacher
from mrl.trainers.caches import RowCache
from mrl.trainers.console import Console
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


def fill_where_a_file_is_not_seen(folder: str, hidden: str) -> tuple[int, str]:
    """Returns how often the model was asked for two known rows, and the error. The last rank does not see a file.

    hidden: it sees none "at first", never the "old" one, or "all" never. A file that no rank can read stays or goes as
    one of another model.
    """
    batches = [make_batch([[i, 1, 2]], [[0, 1, 1]]) for i in range(2)]
    cache, asked, reads = RowCache(pathlib.Path(folder), {}, ("log_probs",), per_token=False), [], []
    if collective.is_main():
        for batch in batches:
            cache.add(batch, {"log_probs": torch.zeros(1)})
        cache.write()
        pathlib.Path(folder, "log_probs-00009.pt").write_bytes(b"")
    dist.barrier()

    def ask(batch: Batch) -> dict[str, torch.Tensor]:
        dist.barrier()
        asked.append(batch)
        return {"log_probs": torch.ones(1)}

    dispatch = types.SimpleNamespace(on_main=collective.on_main, engines={})
    trainer: Any = types.SimpleNamespace(dispatch=dispatch, console=Console(), stop_requested=False)
    original = caches.saved_by
    with mock.patch.object(caches, "saved_by", lambda *of, **how: _hidden(original, reads, hidden, *of, **how)):
        try:
            caches.fill(cache, batches, lambda: ask, trainer, name="reference", what="log-probs")
        except CheckpointError as error:
            return len(asked), str(error)
    found = [float(cache.of(batch)["log_probs"][0]) for batch in batches]
    assert found == [1.0, 1.0] or found == [0.0, 0.0], found
    assert not pathlib.Path(folder, "log_probs-00009.pt").exists()  # the main process could not read it either
    return len(asked), ""


def _hidden(read: Any, reads: list[str], hidden: str, path: pathlib.Path, *of: Any, **how: Any) -> Any:
    """Reads a file, if the last rank shall see it."""
    reads.append(path.name)
    is_hidden = {"at first": len(reads) == 1, "old": path.name == "log_probs-00000.pt", "all": True}[hidden]
    return None if is_hidden and dist.get_rank() == dist.get_world_size() - 1 else read(path, *of, **how)
