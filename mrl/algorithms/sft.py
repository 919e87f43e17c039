"""Supervised fine-tuning: the negative log-likelihood of the tokens that train.

Dimensions: `T` tokens of a micro-batch, end to end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mrl.batch import Batch


def sft_loss(data: Batch, predictions: Mapping[str, Tensor], ctx: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """Returns `-sum_t mask_t * log p(label_t)`: a sum; the engine divides by the tokens of the global mini-batch.

    predictions["log_probs"]: [T], of `data.labels`. A label whose mask is 0 adds nothing, whatever its log-prob.
    """
    log_probs_T, mask_T = predictions["log_probs"], data.loss_mask
    assert log_probs_T.shape == mask_T.shape, f"log_probs {tuple(log_probs_T.shape)}, mask {tuple(mask_T.shape)}"
    nll_T = -log_probs_T.masked_fill(mask_T == 0, 0.0)
    return (nll_T * mask_T).sum(), ctx
