"""The bound of a difference of log-probs before its exponential is taken."""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 20.0


def clamped_log_ratio(log_ratio: Tensor) -> Tensor:
    """Clamps `log p - log q` to -20 and 20, without gradient beyond.

    In fp32 exp(89) is infinite. If a clip or a mask then takes the infinity out of a loss, its gradient is 0 * inf, not
    a number. verl has the same bound (trainer/ppo/core_algos.py, compute_policy_loss and kl_penalty_forward), and so
    has OpenRLHF (openrlhf/models/loss.py, PolicyLoss). A token e^20 times likelier is far outside every clip.
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
