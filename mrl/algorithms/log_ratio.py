"""The bound of a difference of log-probs before its exponential is taken."""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 20.0


def clamped_log_ratio(log_ratio: Tensor) -> Tensor:
    """`log p - log q`, at least -20 and at most 20; there is no gradient beyond.

    In fp32 exp(89) is infinite, and where a clip or a mask then takes the infinity out of a loss, its gradient is 0 *
    inf, not a number. The bound is that of verl (trainer/ppo/core_algos.py, compute_policy_loss and kl_penalty_forward)
    and of OpenRLHF (openrlhf/models/loss.py, PolicyLoss): a token that is e^20 times likelier is far outside every
    clip.
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
