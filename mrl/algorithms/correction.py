"""Importance correction: sampler and trainer, with the same weights, give slightly different probabilities.

Dimensions: `T` tokens of a micro-batch end to end, `S` sequences.

With `c = p_trainer / p_rollout` of a token, or the product of `c` over a sequence's trained tokens at each of them, and
a `cap` (and a `floor`), the policy's loss of a token is multiplied by

    truncate    min(c, cap)                          TIS (Yao 2025, "Your Efficient RL Framework Secretly Brings You
                                                     Off-Policy RL Training")
    mask        c where floor <= c <= cap, else 0    MIS (Liu and Li 2025, "When Speed Kills Stability"), with a floor
                                                     IcePop (Ling team 2025)

A token with weight 0 still counts in the denominator: the estimate is a mean over all sampled tokens. To leave
rejected sequences out of the mean as well, put the weights into the loss mask before the mini-batch is made.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

from torch import Tensor

from mrl.algorithms.log_ratio import clamped_log_ratio
from mrl.algorithms.ragged import sum_per_sequence, to_tokens


@dataclasses.dataclass(frozen=True)
class Correction:
    """The weighting of the policy's loss; floor is for `mask` alone."""

    mode: Literal["truncate", "mask"]
    level: Literal["token", "sequence"] = "token"
    cap: float = 2.0
    floor: float = 0.0


class CorrectionWeights(NamedTuple):
    """The weights that correct for the sampler's probabilities."""

    weight_T: Tensor  # [T], without gradient
    limited_T: Tensor  # [T] bool, where the ratio itself was not used


def importance_weights(
    trainer_log_probs_T: Tensor,
    rollout_log_probs_T: Tensor,
    mask_T: Tensor,
    lengths_S: Tensor,
    *,
    correction: Correction,
) -> CorrectionWeights:
    """Returns the weights of the table above; 1 outside the mask at the token level.

    trainer_log_probs_T: of the weights that sampled, before any update ("old"). rollout_log_probs_T: as the sampler
    gave them, of the distribution it sampled from. Whatever outside the mask.
    """
    gap_T = (trainer_log_probs_T - rollout_log_probs_T).detach().masked_fill(mask_T == 0, 0.0)
    if correction.level == "sequence":
        gap_T = to_tokens(sum_per_sequence(gap_T, lengths_S), lengths_S)
    ratio_T = clamped_log_ratio(gap_T).exp()
    if correction.mode == "truncate":
        return CorrectionWeights(ratio_T.clamp(max=correction.cap), ratio_T > correction.cap)
    rejected_T = (ratio_T > correction.cap) | (ratio_T < correction.floor)
    return CorrectionWeights(ratio_T.masked_fill(rejected_T, 0.0), rejected_T)


def effective_samples(mean: float, mean_of_squares: float) -> float:
    """Returns the effective sample size of weights as a share of their number: (sum w)^2 / (n sum w^2), from 0 to 1.

    Kong (1992), "A note on importance sampling using standardized weights".
    """
    return mean * mean / mean_of_squares if mean_of_squares else 0.0
