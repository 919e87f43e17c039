"""What the ranks of a test world run: the trainer, with things happening to it at a given step."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem

from mrl.config.load import from_dict
from mrl.data import remote
from mrl.data.batches import BatchSource
from mrl.data.dataset import SFTDataset
from mrl.data.files import BadRow
from mrl.engine import checkpoint_remote
from mrl.engine.base import GradNorm
from mrl.engine.fsdp.engine import FSDPEngine
from mrl.errors import Stopped, UserError
from mrl.metrics import MetricsLog
from mrl.trainers import rows, sft
from mrl.trainers.rows import Evaluation, RowsTrainer
from mrl.trainers.run_directory import RunDirectory


def train(config: Mapping[str, Any], *, happening: str | None = None, **details: Any) -> tuple[str, str, str]:
    """Runs the trainer. Returns how it ended ("done", "stopped" or the error's class), its message, and what it printed."""
    around = HAPPENINGS[happening](**details) if happening else contextlib.nullcontext()
    with around:
        return outcome(lambda: sft.run(from_dict(config), "mrl sft config.yaml"))


def outcome(run: Callable[[], None]) -> tuple[str, str, str]:
    """How a run ended, alike on all ranks: see `train`."""
    ended, said = ("done", ""), io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            run()
        except Stopped as stop:
            ended = ("stopped", str(stop))
        except UserError as error:
            ended = (type(error).__name__, str(error))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, ended[0])
    assert len(set(everyone)) == 1, f"ranks ended differently: {everyone}"
    return *ended, said.getvalue()


@contextlib.contextmanager
def signals(step: int, name: str = "SIGTERM", rank: int = 0, again: bool = False) -> Iterator[None]:
    """A signal to one rank when it writes the metrics of `step`; `again`: two more inside the save that follows."""

    def send(times: int) -> None:
        for _ in range(times if dist.get_rank() == rank else 0):
            os.kill(os.getpid(), getattr(signal, name))

    at_step = before_step(lambda _, number: number == step and send(1))
    in_save = before(FSDPEngine, "save_checkpoint", lambda *_, **__: again and send(2))
    with at_step, in_save:
        yield


@contextlib.contextmanager
def signal_in_evaluation(step: int) -> Iterator[None]:
    """SIGTERM to the last rank at the second batch of the evaluation after `step`."""
    now = {"step": 0, "batches": 0}

    def note_step(_: RowsTrainer, number: int) -> None:
        now.update(step=number, batches=0)

    def note_batch(*_: Any, forward_only: bool = False, **__: Any) -> None:
        now["batches"] += forward_only
        if forward_only and now == {"step": step, "batches": 1} and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with before_step(note_step), before(FSDPEngine, "forward_backward_step", note_batch):
        yield


@contextlib.contextmanager
def signal_at_start() -> Iterator[None]:
    """SIGTERM while the model is built."""
    with before(FSDPEngine, "init_model", lambda *_: os.kill(os.getpid(), signal.SIGTERM)):
        yield


@contextlib.contextmanager
def nan_loss(step: int, part: str = "train") -> Iterator[None]:
    """The loss of `step`, or the one on the evaluation set after it, is not a number."""
    now = {"part": "train", "step": 0}

    def note_step(_: RowsTrainer, number: int) -> None:
        now.update(part="train", step=number)

    def note_eval(*_: Any, **__: Any) -> None:
        now["part"] = "eval"

    def poisoned(data: Any, predictions: Any, ctx: Any) -> Any:
        loss, ctx = sft.sft_loss.original(data, predictions, ctx)
        return loss * (float("nan") if now == {"part": part, "step": step} else 1.0), ctx

    poisoned.original = sft.sft_loss
    patched = mock.patch.object(sft, "sft_loss", poisoned)
    with before_step(note_step), before(Evaluation, "run", note_eval), patched:
        yield


@contextlib.contextmanager
def step_changes(what: str) -> Iterator[None]:
    """The optimizer step does something wrong. what: "nothing", "skip", or part of a parameter's name to put back."""
    original = FSDPEngine.optimizer_step

    def wrong(engine: FSDPEngine) -> GradNorm:
        if what == "nothing":
            return GradNorm(1.0)
        if what == "skip":
            return GradNorm(float("inf"), skipped="a gradient is not finite")
        kept = {n: p.detach().clone() for n, p in engine.model.module.named_parameters() if what in n}
        norm = original(engine)
        with torch.no_grad():
            for name, parameter in engine.model.module.named_parameters():
                if name in kept:
                    parameter.copy_(kept[name])
        return norm

    with mock.patch.object(FSDPEngine, "optimizer_step", wrong):
        yield


@contextlib.contextmanager
def remote_fails(times: int) -> Iterator[None]:
    """The first `times` files that are copied to a remote fail. Nobody waits."""
    left = [times]

    def refuse(*_: Any, **__: Any) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise ConnectionError("no route")

    patched = mock.patch.object(checkpoint_remote, "PAUSES_S", (0.0, 0.0, 0.0))
    with before(LocalFileSystem, "put_file", refuse), patched:
        yield


@contextlib.contextmanager
def only_main_writes() -> Iterator[None]:
    """Any other rank that makes a folder or opens a file to write in this trainer's own code fails (trap 34)."""

    def refuse(*_: Any, **__: Any) -> None:
        assert dist.get_rank() == 0, "a rank other than the main one writes into the run's directory"

    names = ("prepare", "save_failed_batch", "name_best", "forget_export", "publish_export")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(before(RunDirectory, name, refuse))
        stack.enter_context(before(MetricsLog, "__init__", lambda _, path, *__: path is None or refuse()))
        yield


@contextlib.contextmanager
def before_step(first: Callable[[RowsTrainer, int], Any]) -> Iterator[None]:
    """Calls `first` with the trainer and the number of a step before each step of `mrl sft`, `mrl dpo` or `mrl rm`."""
    now: dict[str, Any] = {}

    def note_loop(trainer: RowsTrainer) -> None:
        now.update(trainer=trainer)

    def note_batch(_: BatchSource) -> None:
        first(now["trainer"], now["trainer"].progress.step + 1)

    with before(rows, "loop", note_loop), before(BatchSource, "next", note_batch):
        yield


@contextlib.contextmanager
def before(owner: Any, name: str, first: Callable[..., Any]) -> Iterator[None]:
    """Calls `first` with the same arguments before each call of `owner.name`."""
    original = getattr(owner, name)

    def both(*args: Any, **kwargs: Any) -> Any:
        first(*args, **kwargs)
        return original(*args, **kwargs)

    with mock.patch.object(owner, name, both):
        yield


@contextlib.contextmanager
def source_fails(step: int, switch: str) -> Iterator[None]:
    """The web server of the rows fails from `step` on, as the file `switch` tells it to; nobody waits for it."""
    at_step = before_step(lambda _, number: number == step and pathlib.Path(switch).touch())
    with at_step, mock.patch.object(remote, "WAITS_S", (0, 0)):
        yield


@contextlib.contextmanager
def rank_cannot_read(rank: int, row: int, method: str = "_make") -> Iterator[None]:
    """A row cannot be read on one rank alone, as where a file lies on one node. method: of the dataset, that fails."""

    def refuse(dataset: SFTDataset, index: int, *_: Any) -> None:
        if dist.get_rank() == rank and dataset.part == "train" and index == row:
            raise BadRow("no such image here")

    with before(SFTDataset, method, refuse):
        yield


HAPPENINGS: dict[str, Callable[..., contextlib.AbstractContextManager[None]]] = {
    each.__name__: each
    for each in (
        signals, nan_loss, signal_in_evaluation, signal_at_start, step_changes, only_main_writes, remote_fails,
        source_fails, rank_cannot_read,
    )
}  # fmt: skip
