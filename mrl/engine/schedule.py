"""Computes learning rates as one pure function of the step.

A schedule's only state is the number of steps made, so restoring it means restoring an integer. There is no scheduler
object for a resumed run to step twice or to rebuild with another length.
"""

from __future__ import annotations

import math

from mrl.config.schema import OptimizerConfig


def learning_rate(step: int, *, optimizer: OptimizerConfig, total_steps: int) -> float:
    """Returns the rate of optimizer step number `step`, counted from 0, in a run of `total_steps`.

    In warm-up, step `i` of `warmup_steps` has `lr * (i + 1) / warmup_steps`, so the first step already trains. Then:

    - `constant` stays at lr
    - `linear` and `cosine` fall to min_lr over `decay_steps` (the rest of the run by default) and stay there
    - `wsd` stays at lr and falls linearly over the last `decay_steps` (a tenth of the run by default)
      (S. Hu et al., "MiniCPM", arXiv 2404.06395, section 4)
    """
    peak, low, warmup = optimizer.lr, optimizer.min_lr, optimizer.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if optimizer.schedule == "constant":
        return peak
    if optimizer.schedule == "wsd":
        start = max(warmup, total_steps - (optimizer.decay_steps or math.ceil(total_steps / 10)))
        decay = max(1, total_steps - start)
    else:
        decay = optimizer.decay_steps or max(1, total_steps - warmup)
        start = warmup
    progress = min(max(step - start, 0) / decay, 1.0)
    if optimizer.schedule == "cosine":
        return low + (peak - low) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak + (low - peak) * progress
