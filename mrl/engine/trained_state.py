"""Takes the trained state out of an engine's model and puts it back, so that several models share one base."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class UpdateSettings:
    """Holds the settings of one optimizer step that the caller decides, not the config."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float  # decoupled; biases and norms do not decay
    clip_grad: float  # global L2 norm; 0 for none


@dataclasses.dataclass(frozen=True)
class TrainedState:
    """Holds this rank's part of what trains: made by `BaseEngine.trained_state`, for `set_trained_state` of that
    engine.

    weights: shards of parameters, and of their masters. moments: AdamW's, zero before its first step. gradients: the
    accumulated ones; None if there are none or a step has spent them.
    """

    weights: Sequence[Tensor]
    moments: Sequence[Tensor]
    updates: int  # AdamW's number of updates
    gradients: Sequence[Tensor | None] | None
    spent: bool


def clone_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns copies that nothing else holds."""
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


def restore_tensors(tensors: Iterable[Tensor], copies: Iterable[Tensor]) -> None:
    """Fills `tensors` from the copies of `clone_tensors`."""
    for tensor, copied in zip(tensors, copies, strict=True):
        tensor.copy_(copied)
