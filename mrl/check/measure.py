"""Runs each rank's work of a layout: one optimizer step of the engine, compared with a reference as it goes.

The engine's own methods give whole values on the main process: nothing here knows a rank or a process group.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mrl.batch import Batch
from mrl.check.bounds import Bounds
from mrl.check.compare import TensorErrors, is_sure, tensor_errors, update_error
from mrl.config.schema import RoleConfig
from mrl.engine.base import PLAIN_CTX, BaseEngine, LossFn
from mrl.engine.lora.folder import read_adapter
from mrl.engine.registry import build_engine
from mrl.weights.pt_file import load_pt

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
KINDS = ("start", "gradients", "weights")
NUMBERS = "numbers.pt"


@dataclasses.dataclass(frozen=True)
class StepNumbers:
    """Holds the numbers of one way of computing the step. Tensors are apart."""

    loss: float
    grad_norm: float
    log_probs: Tensor  # [T], 0 where the mask is 0; values of a value head


@dataclasses.dataclass(frozen=True)
class LayoutComparison:
    """Holds the errors of a layout against the reference."""

    loss: float
    expected_loss: float
    grad_norm: float
    expected_grad_norm: float
    log_probs: float  # the largest difference
    log_probs_at: int  # the place [T] of it
    decided_log_probs: float | None  # the same of labels that no undecided router is before; None: all are
    decided_labels: int  # how many such labels there are
    start: TensorErrors  # weights before the step
    gradients: TensorErrors
    weights: TensorErrors  # what the step made of them
    weights_share: float  # of the elements with a gradient, those whose update could be compared
    bounds: Bounds

    @property
    def loss_error(self) -> float:
        """Returns the difference, relative to losses above 1."""
        return abs(self.loss - self.expected_loss) / max(abs(self.expected_loss), 1.0)

    @property
    def grad_norm_error(self) -> float:
        return abs(self.grad_norm - self.expected_grad_norm) / max(self.expected_grad_norm, 1e-30)


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
    undecided: Tensor | None = None  # [T], of `mrl.check.routers`
    writes: bool = False  # whether this layout is what others are compared with


class Store:
    """Is a folder with the numbers of one way of computing the step. Others are compared with them."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def write(self, numbers: StepNumbers, **tensors: Mapping[str, Tensor]) -> None:
        """Writes the numbers. tensors: of each of `KINDS`, by name."""
        for kind in KINDS:
            whole = {name: t.detach().cpu().float().contiguous() for name, t in tensors[kind].items()}
            save_file(whole, self.folder / f"{kind}.safetensors")
        torch.save(dataclasses.asdict(numbers), self.folder / NUMBERS)

    @property
    def is_written(self) -> bool:
        return (self.folder / NUMBERS).exists()

    @functools.cached_property
    def numbers(self) -> StepNumbers:
        return StepNumbers(**load_pt(self.folder / NUMBERS))

    @functools.cache  # noqa: B019 - one for each layout
    def _file(self, kind: str) -> Any:
        return safe_open(self.folder / f"{kind}.safetensors", "pt")

    def names(self, kind: str) -> list[str]:
        return list(self._file(kind).keys())

    def tensor(self, kind: str, name: str) -> Tensor:
        return self._file(kind).get_tensor(name)

    def reader(self, kind: str) -> Callable[[str], Tensor]:
        return functools.partial(self.tensor, kind)


def measure(work: LayoutWork) -> LayoutComparison | None:
    """Makes one optimizer step. Returns its numbers against the reference, on the main process."""
    engine, store = make_engine(work.config, work.loss_fn, work.denominator), Store(work.reference)
    expected, head = store.numbers, work.config.head
    bounds = work.bounds.given(expected.log_probs) if head == "lm" else work.bounds
    start = tensor_errors(engine.hf_weights(), store.reader("start"), store.names("start"), bound=0.0)
    before = store.reader("start")
    if work.adapter is not None:
        engine.load_adapter(work.adapter)
        before = read_adapter(work.adapter)[1].get
    loss, log_probs = forward_backward(engine, work.batch, work.ctx)
    gradients = tensor_errors(
        engine.hf_gradients(), store.reader("gradients"), store.names("gradients"), bound=bounds.gradients
    )
    grad_norm = float(engine.optimizer_step())
    weights, weights_share = _weight_errors(engine, work, store, before, bounds)
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
    numbers = StepNumbers(loss, grad_norm, log_probs)
    Store(work.reference).write(numbers, start=start, gradients=gradients, weights=weights)


def make_engine(config: RoleConfig, loss_fn: LossFn, denominator: str = "tokens") -> BaseEngine:
    engine = build_engine(config)
    engine.init_model()
    engine.set_loss_fn(loss_fn, denominator)
    return engine


def forward_backward(
    engine: BaseEngine, batch: Batch, ctx: Mapping[str, float] = PLAIN_CTX
) -> tuple[float, Tensor]:  # fmt: skip
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
    engine: BaseEngine, work: LayoutWork, store: Store, before: Callable[[str], Tensor | None], bounds: Bounds
) -> tuple[TensorErrors, float]:  # fmt: skip
    """Compares the weights after the step. Also returns the share of elements with a gradient that could be
    compared."""
    has_gradient = set(store.names("gradients"))
    dtype = torch.float32 if work.adapter is not None else DTYPES[work.config.model.dtype]
    grad_norm = store.numbers.grad_norm
    elements = compared = 0

    def error(name: str, actual: Tensor, expected: Tensor) -> float:
        was = before(name)
        assert was is not None, name
        nonlocal elements, compared
        gradient = store.tensor("gradients", name) if name in has_gradient else None
        if gradient is not None:
            sure, has = is_sure(gradient, grad_norm=grad_norm, rounding=bounds.gradients), gradient != 0
            elements, compared = elements + int(has.sum()), compared + int((sure & has).sum())
        return update_error(
            was, actual, expected, gradient, grad_norm=grad_norm, rounding=bounds.gradients, dtype=dtype
        )

    errors = tensor_errors(
        trained_weights(engine), store.reader("weights"), store.names("weights"), bound=bounds.weights, error=error
    )
    return errors, compared / max(elements, 1)
