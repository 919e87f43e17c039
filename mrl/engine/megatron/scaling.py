"""Divides a loss on the megatron backend. Nothing else divides.

A loss function returns the sum `s` over its micro-batch, and we want, for the denominator `D` of the global mini-batch,

    G = d/dw  sum over data-parallel ranks r and micro-batches m of  s[r, m] / D

The loss function of megatron's schedule returns `(L, metrics)`, a 2-tuple. With `calculate_per_token_loss=False`
megatron makes `L * cp / M` of the scalar `L`, with `M` micro-batches in the call (schedules.forward_step_calc_loss).
Its DistributedDataParallel scales gradients by `1 / (dp * cp)` and sums them over the dp * cp ranks. The outputs are
gathered over the context-parallel group before the loss, and the backward pass gives each rank its own part
(inputs.restore). So over that group gradients add up to those of one loss. With `L = s / D * f` the reduced gradient is

    sum over r, c, m  of  d/dw (s[r, m] part c) / D * f * (cp / M) / (dp * cp)  =  G * f / (M * dp)

hence `f = M * dp`: context parallelism cancels. Experts are reduced over fewer ranks (edp) but scaled by the same `1 /
(dp * cp)`. Their gradients have already been summed over the ranks that sent them tokens, so the same `f` holds.

Router losses are not part of `L`. megatron gives each MoE layer's a gradient scale of `grad_scale_func(1) * cp / M`, so
the mean over micro-batches and ranks counts. A mini-batch may come in several calls that accumulate gradients. A call
then counts with its share of the tokens, `share = (its loss tokens on all ranks) / D`. `grad_scale_func` is `x *
share`. megatron applies it to `L` too, so `L` is divided by `share`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def megatron_loss(loss_sum: Tensor, *, denominator: float, micro_batches: int, dp: int, share: float = 1.0) -> Tensor:
    """Returns the scalar for megatron's schedule from a micro-batch's loss sum; see the module's derivation."""
    return loss_sum * (micro_batches * dp / (denominator * share))


def megatron_scale(share: float) -> Callable[[Any], Any] | None:
    """Returns `grad_scale_func` of a call with `share` of the mini-batch's tokens; None if it has all."""
    return None if share == 1.0 else lambda value: value * share
