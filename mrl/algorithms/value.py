"""The critic's loss, and how much of the returns it explains.

Dimensions: `T` tokens of a micro-batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ValueLoss(NamedTuple):
    """The critic's loss of each token."""

    loss_T: Tensor  # [T], with gradient
    clipped_T: Tensor  # [T] bool, where the clipped term is the larger and takes the gradient away


def value_loss(values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, *, clip: float = 0.0) -> ValueLoss:
    """Returns the squared error of the values, kept near the old ones if `clip` is not 0. [T] each.

        l = 1/2 max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2)

    Schulman 2017, eq. 9, has the squared error; its clip is that of the authors' code, PPO2 (openai/baselines).
    """
    assert values_T.shape == old_values_T.shape == returns_T.shape
    plain_T = (values_T - returns_T).square()
    if not clip:
        return ValueLoss(plain_T / 2, torch.zeros_like(plain_T, dtype=torch.bool))
    near_T = old_values_T + (values_T - old_values_T).clamp(-clip, clip)
    clipped_T = (near_T - returns_T).square()
    return ValueLoss(torch.maximum(plain_T, clipped_T) / 2, clipped_T > plain_T)


def explained_variance(*, returns: float, returns_squared: float, error: float, error_squared: float) -> float:
    """Returns `1 - Var(R - V) / Var(R)` from means over the same tokens: of `R`, `R^2`, `R - V`, `(R - V)^2`.

    1: the critic knows the returns; 0: no better than a constant; negative: worse. Returns that are all equal leave
    nothing to explain, and it is 0.
    """
    variance = returns_squared - returns**2
    if variance <= 1e-12 * returns_squared:  # what fp64 leaves of equal numbers
        return 0.0
    return 1.0 - (error_squared - error**2) / variance
