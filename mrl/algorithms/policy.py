"""Policy objectives: what to minimize at each token, given how much likelier the token has become.

Dimensions: `T` tokens of a micro-batch end to end, `S` sequences.

Two choices that combine freely. The *ratio* `r` between the policy and the one that sampled (as the trainer computes
both): of the token or of its sequence. The *objective*: clipped, CISPO, or the plain policy gradient.

Importance correction is here, too: sampler and trainer, with the same weights, give slightly different probabilities.
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
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mrl.algorithms.ragged import sum_per_sequence, to_tokens

MAX_LOG_RATIO = 20.0


def clamped_log_ratio(log_ratio: Tensor) -> Tensor:
    """Clamps `log p - log q` to -20 and 20, without gradient beyond.

    In fp32 exp(89) is infinite. If a clip or a mask then takes the infinity out of a loss, its gradient is 0 * inf, not
    a number. verl has the same bound (trainer/ppo/core_algos.py, compute_policy_loss and kl_penalty_forward), and so
    has OpenRLHF (openrlhf/models/loss.py, PolicyLoss). A token e^20 times likelier is far outside every clip.
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclasses.dataclass(frozen=True)
class Clip:
    """The range `1 - low` to `1 + high` that a ratio is kept in."""

    low: float
    high: float
    dual: float = 0.0  # the bound of a ratio whose advantage is negative; 0 for none


class PolicyLoss(NamedTuple):
    """The loss of each token, without the KL penalty."""

    loss_T: Tensor  # [T], with gradient
    clipped_T: Tensor  # [T] bool, where clipping changed the loss or its gradient


# -- ratios ------------------------------------------------------------------------------------------------------------
# log_probs_T: [T] with gradient; old_log_probs_T: [T]; both finite, and equal (as 0 is) where nothing trains. No ratio
# is beyond exp(-20) to exp(20): see `clamped_log_ratio`.


def token_ratio(log_probs_T: Tensor, old_log_probs_T: Tensor, mask_T: Tensor, lengths_S: Tensor) -> Tensor:
    """Returns [T]: `p(token) / p_old(token)` (PPO, Schulman 2017, section 3)."""
    return clamped_log_ratio(log_probs_T - old_log_probs_T).exp()


def sequence_ratio(log_probs_T: Tensor, old_log_probs_T: Tensor, mask_T: Tensor, lengths_S: Tensor) -> Tensor:
    """Returns [T]: `s = (p(y) / p_old(y))^(1/|y|)` of a token's sequence, over trained tokens (GSPO, Zheng 2025, eq.
    7)."""
    log_ratio_S = _mean_log_ratio(log_probs_T - old_log_probs_T, mask_T, lengths_S)
    return to_tokens(clamped_log_ratio(log_ratio_S), lengths_S).exp()


def sequence_token_ratio(log_probs_T: Tensor, old_log_probs_T: Tensor, mask_T: Tensor, lengths_S: Tensor) -> Tensor:
    """Returns [T]: `sg[s] p(token) / sg[p(token)]`: the number of `sequence_ratio`, the gradient of the token
    (GSPO-token, eq. 14).

    Loss and gradient are those of `sequence_ratio` if all tokens of a sequence have one advantage and one weight.
    """
    log_ratio_S = _mean_log_ratio((log_probs_T - old_log_probs_T).detach(), mask_T, lengths_S)
    return clamped_log_ratio(to_tokens(log_ratio_S, lengths_S) + log_probs_T - log_probs_T.detach()).exp()


def _mean_log_ratio(log_ratio_T: Tensor, mask_T: Tensor, lengths_S: Tensor) -> Tensor:
    """Returns [S]: the mean over each sequence's trained tokens; 0 if there are none."""
    trained_T = (mask_T != 0).to(log_ratio_T.dtype)
    return sum_per_sequence(log_ratio_T * trained_T, lengths_S) / sum_per_sequence(trained_T, lengths_S).clamp(min=1)


RATIOS: Mapping[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "token": token_ratio,
    "sequence": sequence_ratio,
    "sequence_token": sequence_token_ratio,
}
"""`algorithm.ratio` -> how."""


# -- objectives --------------------------------------------------------------------------------------------------------


def clipped_surrogate(ratio_T: Tensor, log_probs_T: Tensor, advantages_T: Tensor, clip: Clip) -> PolicyLoss:
    """Computes PPO's clipped surrogate (Schulman 2017, eq. 7), with two bounds (DAPO's clip-higher, Yu 2025, eq. 10).

        l = -min(r A, clip(r, 1 - low, 1 + high) A)            and, with dual clip (Ye 2020), where A < 0:
        l = -max(min(r A, clip(r, 1 - low, 1 + high) A), dual A)

    Without the dual clip a token with A < 0 that became much likelier pulls without bound.
    """
    surrogate_T = ratio_T * advantages_T
    kept_T = ratio_T.clamp(1 - clip.low, 1 + clip.high) * advantages_T
    objective_T, clipped_T = torch.minimum(surrogate_T, kept_T), kept_T < surrogate_T
    if clip.dual:
        assert clip.dual > 1, f"the dual clip is {clip.dual}; it bounds ratios above 1"
        bound_T = clip.dual * advantages_T
        clipped_T = clipped_T | ((advantages_T < 0) & (objective_T < bound_T))
        objective_T = torch.where(advantages_T < 0, torch.maximum(objective_T, bound_T), objective_T)
    return PolicyLoss(-objective_T, clipped_T)


def cispo(ratio_T: Tensor, log_probs_T: Tensor, advantages_T: Tensor, clip: Clip) -> PolicyLoss:
    """Computes `l = -sg[clip(r, 1 - low, 1 + high)] A log p` (CISPO, MiniMax-M1 2025, eq. 4-5).

    The weight is clipped, so no token is lost. The paper sets no lower bound: low 1, because ratios are positive.
    """
    weight_T = ratio_T.detach().clamp(1 - clip.low, 1 + clip.high)
    return PolicyLoss(-weight_T * advantages_T * log_probs_T, weight_T != ratio_T.detach())


def policy_gradient(ratio_T: Tensor, log_probs_T: Tensor, advantages_T: Tensor, clip: Clip) -> PolicyLoss:
    """Computes `l = -A log p` (REINFORCE, Williams 1992): right for the present policy, so one update a rollout."""
    return PolicyLoss(-advantages_T * log_probs_T, torch.zeros_like(ratio_T, dtype=torch.bool))


OBJECTIVES: Mapping[str, Callable[[Tensor, Tensor, Tensor, Clip], PolicyLoss]] = {
    "clip": clipped_surrogate,
    "cispo": cispo,
    "policy_gradient": policy_gradient,
}
"""`algorithm.objective` -> what."""


def largest_ratio(log_probs_T: Tensor, old_log_probs_T: Tensor, mask_T: Tensor) -> float:
    """Returns the largest `max(r, 1/r)` over the tokens that train, 1 if none does.

    It takes the forward of a whole mini-batch: a maximum is no sum, so no loss function can report it.
    """
    trained_T = mask_T != 0
    gaps = clamped_log_ratio(log_probs_T[trained_T] - old_log_probs_T[trained_T]).detach().abs()
    return float(gaps.max().exp()) if gaps.numel() else 1.0


# -- importance correction ---------------------------------------------------------------------------------------------


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
