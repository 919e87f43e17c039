"""Runs each rank's work of a layout: one optimizer step of the engine, compared with a reference as it goes.

The engine's own methods give whole values on the main process: nothing here knows a rank or a process group.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl.batch import Batch
from mrl.check.compare import Bounds, LayoutComparison, TensorErrors, is_sure, tensor_errors, update_error
from mrl.config.schema import REQUIRED, RoleConfig, key
from mrl.engine.base import PLAIN_CTX, BaseEngine, LossFn
from mrl.engine.lora.folder import read_adapter
from mrl.engine.registry import build_engine
from mrl.weights.pt_file import load_pt

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclasses.dataclass(frozen=True)
class StepNumbers:
    """Holds the numbers of one way of computing the step. Others are compared with them."""

    loss: float
    grad_norm: float
    log_probs: Tensor  # [T], 0 where the mask is 0; values of a value head
    start: Mapping[str, Tensor]  # weights before the step, by name
    gradients: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]  # what the step made of those that train

    def save(self, folder: str | Path) -> None:
        """Writes them into a folder, tensors in fp32."""
        numbers: dict[str, Any] = {"loss": self.loss, "grad_norm": self.grad_norm, "log_probs": self.log_probs}
        for kind in ("start", "gradients", "weights"):
            tensors = getattr(self, kind)
            numbers[kind] = {name: t.detach().cpu().float().contiguous() for name, t in tensors.items()}
        torch.save(numbers, numbers_file(folder))


def numbers_file(folder: str | Path) -> Path:
    return Path(folder, "numbers.pt")


@dataclasses.dataclass(frozen=True)
class LayoutWork:
    """Is the step to compute for a layout."""

    config: RoleConfig
    batch: Batch
    loss_fn: LossFn
    denominator: str  # of the loss, a count of the batch
    ctx: Mapping[str, float]  # of the step: the temperature, and what else the loss function reads
    adapter: str | None  # a folder of adapters to start from
    reference: str  # a folder of `write`
    bounds: Bounds
    undecided: Tensor | None = None  # [T], of `mrl.check.reference`
    writes: bool = False  # whether this layout is what others are compared with


def measure(work: LayoutWork) -> LayoutComparison | None:
    """Makes one optimizer step. Returns its numbers against the reference, on the main process."""
    engine = make_engine(work.config, work.loss_fn, work.denominator)
    expected = StepNumbers(**load_pt(numbers_file(work.reference), mmap=True))
    head = work.config.head
    bounds = work.bounds.given(expected.log_probs) if head == "lm" else work.bounds
    start = tensor_errors(engine.hf_weights(), expected.start, bound=0.0)
    before = expected.start
    if work.adapter is not None:
        engine.load_adapter(work.adapter)
        before = read_adapter(work.adapter)[1]
    loss, log_probs = forward_backward(engine, work.batch, work.ctx)
    gradients = tensor_errors(engine.hf_gradients(), expected.gradients, bound=bounds.gradients)
    grad_norm = float(engine.optimizer_step())
    weights, weights_share = _weight_errors(engine, work, expected, before, bounds)
    if not engine.is_main:
        return None
    gap = (log_probs - expected.log_probs).abs().nan_to_num(nan=torch.inf)
    decided, labels = None, expected.log_probs != 0
    if work.undecided is not None:
        decided, labels = float(gap.masked_fill(work.undecided, 0.0).max()), labels & ~work.undecided
    return LayoutComparison(
        loss=loss, expected_loss=expected.loss, grad_norm=grad_norm, expected_grad_norm=expected.grad_norm,
        log_probs=float(gap.max()), log_probs_at=int(gap.argmax()), decided_log_probs=decided,
        decided_labels=int(labels.sum()), start=start, gradients=gradients, weights=weights,
        weights_share=weights_share, bounds=bounds,
    )  # fmt: skip


def write(work: LayoutWork) -> None:
    """Makes one optimizer step. Its numbers become the reference for the layouts that are compared with this one."""
    engine = make_engine(work.config, work.loss_fn, work.denominator)
    start = {name: tensor.cpu() for name, tensor in engine.hf_weights()}
    if work.adapter is not None:
        engine.load_adapter(work.adapter)
    loss, log_probs = forward_backward(engine, work.batch, work.ctx)
    gradients = {name: tensor.cpu() for name, tensor in engine.hf_gradients()}
    grad_norm = float(engine.optimizer_step())
    weights = {name: tensor.cpu() for name, tensor in trained_weights(engine)}
    if not engine.is_main:
        return
    StepNumbers(loss, grad_norm, log_probs, start, gradients, weights).save(work.reference)


def make_engine(config: RoleConfig, loss_fn: LossFn, denominator: str = "tokens") -> BaseEngine:
    engine = build_engine(config)
    engine.init_model()
    engine.set_loss_fn(loss_fn, denominator)
    return engine


def forward_backward(engine: BaseEngine, batch: Batch, ctx: Mapping[str, float] = PLAIN_CTX) -> tuple[float, Tensor]:
    """Returns the loss, and log-probs or values [T] in the order of the batch; gradients are on the engine."""
    name = "log_probs" if engine.config.head == "lm" else "values"
    engine.optimizer_zero_grad()
    with engine.train_mode():
        predictions, loss, _ = engine.forward_backward_step(engine.shard_data(batch), dict(ctx))
    return loss, engine.unshard_data({name: predictions[name]}, batch)[name].float().cpu()


def trained_weights(engine: BaseEngine) -> Iterator[tuple[str, Tensor]]:
    """Streams the tensors that an optimizer step changes, and those between them in the files."""
    return engine.hf_weights() if engine.config.model.lora is None else engine.adapter_weights()


def _weight_errors(
    engine: BaseEngine, work: LayoutWork, expected: StepNumbers, before: Mapping[str, Tensor], bounds: Bounds
) -> tuple[TensorErrors, float]:
    """Compares the weights after the step. Also returns the share of elements with a gradient that could be
    compared."""
    dtype = torch.float32 if work.adapter is not None else DTYPES[work.config.model.dtype]
    known = {"grad_norm": expected.grad_norm, "rounding": bounds.gradients}
    elements = compared = 0

    def error(name: str, actual: Tensor, right: Tensor) -> float:
        nonlocal elements, compared
        gradient = expected.gradients.get(name)
        if gradient is not None:
            sure, has = is_sure(gradient, **known), gradient != 0
            elements, compared = elements + int(has.sum()), compared + int((sure & has).sum())
        return update_error(before[name], actual, right, gradient, dtype=dtype, **known)

    errors = tensor_errors(trained_weights(engine), expected.weights, bound=bounds.weights, error=error)
    return errors, compared / max(elements, 1)


# -- a rank, for `mrl.launch.local.launch` -----------------------------------------------------------------------------


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
        work: LayoutWork = torch.load(file, weights_only=False)  # made by this command
        if work.writes:
            write(work)
        elif (found := measure(work)) is not None:
            torch.save(found, result_file(task.folder, number))
        gc.collect()
