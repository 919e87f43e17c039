"""The loss of `mrl unlearn`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mrl.batch import Batch


class UnlearnLoss:
    """`sum_t mask_t * max(log p(label_t) - floor, 0)`: how far the tokens are from being forgotten."""

    def __init__(self, floor: float) -> None:
        self.floor = floor

    def __call__(
        self, data: Batch, predictions: Mapping[str, Tensor], ctx: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        log_probs_T = predictions["log_probs"].masked_fill(data.loss_mask == 0, self.floor)
        return ((log_probs_T - self.floor).clamp(min=0) * data.loss_mask).sum(), ctx
