"""What trains of an engine's model, taken out and put back: how several models share one base."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class UpdateSettings:
    """The settings of one optimizer step that the caller decides, not the config."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float  # decoupled, of what decays: no biases, no norms
    clip_grad: float  # global L2 norm; 0 for none


@dataclasses.dataclass(frozen=True)
class TrainedState:
    """This rank's part of what trains, as `BaseEngine.trained_state` copied it, for `set_trained_state` of that engine.

    weights: shards of parameters, and of their masters. moments: of AdamW, zero before its first step. gradients: as
    they have accumulated, None where there are none or a step has spent them.
    """

    weights: Sequence[Tensor]
    moments: Sequence[Tensor]
    updates: int  # that AdamW has made
    gradients: Sequence[Tensor | None] | None
    spent: bool


def clone_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns copies that nothing else holds."""
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


def restore_tensors(tensors: Iterable[Tensor], copies: Iterable[Tensor]) -> None:
    """Fills `tensors` with what `clone_tensors` made of them."""
    for tensor, copied in zip(tensors, copies, strict=True):
        tensor.copy_(copied)
