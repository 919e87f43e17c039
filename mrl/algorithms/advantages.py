"""Rewards of tokens, and advantages: how much better an action was than what was expected of it.

Dimensions: `T` tokens of all sequences of a rollout end to end, `S` sequences, `G` samples of one prompt, `N` the most
trained tokens of a sequence.

All functions see the whole rollout, take sums in fp64 and return the dtype they were given. A mask only tells which
tokens are actions of the policy (not 0). Prompts are no actions, nor are an environment's observations in
conversations. They have neither reward nor value, and their advantage is 0. The action after an observation follows the
last one before it, one discount apart.

A group is the set of samples of one prompt, of any size. If a group has no differences (all rewards equal, or one
sample), its advantages are exactly 0: there is nothing to compare with. Exactly, because Adam makes full steps of
rounding errors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from mrl.algorithms.ragged import (
    from_trained_columns,
    last_trained_position,
    sum_per_sequence,
    to_tokens,
    trained_columns,
)

# -- rewards -----------------------------------------------------------------------------------------------------------


def token_rewards(
    scores_S: Tensor, mask_T: Tensor, lengths_S: Tensor, *, kl_T: Tensor | None = None, kl_coef: float = 0.0
) -> Tensor:
    """Returns [T]: the reward of each action, `r_t = [t is the last] score - kl_coef kl_t` (Ouyang 2022, eq. 2).

    The result is 0 outside the mask.

    scores_S: a reward for the whole sequence, placed at its last trained token. A sequence without one loses it.
    kl_T: estimates from `mrl.algorithms.kl`, of any value outside the mask.
    """
    rewards_T = scores_S.new_zeros(mask_T.numel())
    last_S = last_trained_position(mask_T, lengths_S)
    rewards_T[last_S[last_S >= 0]] = scores_S[last_S >= 0]
    if kl_T is not None:
        rewards_T = rewards_T - kl_coef * kl_T.masked_fill(mask_T == 0, 0.0)
    return rewards_T


def overlong_penalty(new_tokens_S: Tensor, *, max_length: int, cache: int) -> Tensor:
    """Returns [S], to be added to the score: DAPO's soft overlong punishment (Yu 2025, eq. 13).

    0 up to `max_length - cache` tokens, falling linearly to -1 at `max_length`, -1 above. new_tokens_S: tokens
    after the prompt, as max_length counts them: in a conversation the environment's too.
    """
    assert 0 < cache <= max_length, f"cache {cache} is not within 1 to max_length ({max_length})"
    beyond_S = new_tokens_S.double() - (max_length - cache)
    return -(beyond_S / cache).clamp(0.0, 1.0)


def groups_with_signal(rewards_S: Tensor, groups_S: Tensor) -> Tensor:
    """Returns [S] bool: whether the rewards of a sequence's group differ; DAPO's dynamic sampling keeps those
    (Yu 2025, eq. 11).

    The paper asks for `0 < correct < G` with rewards of right and wrong. For other rewards the same condition is: they
    are not all equal. A group of one has nothing to compare and is dropped. rewards_S: the rewards that decide, in the
    paper the accuracy before any shaping. groups_S: int64, the same number for samples of one prompt.
    """
    _, group_S = groups_S.unique(return_inverse=True)
    count = int(group_S.max()) + 1 if group_S.numel() else 0
    lowest, highest = (
        rewards_S.new_zeros(count).scatter_reduce(0, group_S, rewards_S, reduce=reduce, include_self=False)
        for reduce in ("amin", "amax")
    )
    return (lowest < highest)[group_S] if count else torch.zeros(0, dtype=torch.bool, device=rewards_S.device)


# -- advantages --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """The rollout that advantages are made from. A field that the estimator does not need may be None."""

    rewards_T: Tensor  # of each action (see `token_rewards`), 0 outside the mask
    mask_T: Tensor  # not 0 where an action is
    lengths_S: Tensor  # int64, sums to T
    groups_S: Tensor | None = None  # int64, equal for samples of one prompt
    values_T: Tensor | None = None  # the critic's, of the state in which each action was taken
    baselines_S: Tensor | None = None  # the reward of the greedy answer to each sequence's prompt

    @property
    def scores_S(self) -> Tensor:
        """The undiscounted sum of each sequence's rewards."""
        return sum_per_sequence(self.rewards_T.double(), self.lengths_S).to(self.rewards_T.dtype)


# -- with a critic ----------------------------------------------------------------------------------------------------


def gae(
    rewards_T: Tensor, values_T: Tensor, mask_T: Tensor, lengths_S: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Returns advantages and returns, [T] each, by generalized advantage estimation (Schulman 2015, eq. 16).

        delta_t = r_t + gamma V(s_t+1) - V(s_t)        A_t = delta_t + gamma lam A_t+1        R_t = A_t + V(s_t)

    over the actions of a sequence; after the last one the value is 0, also where a length limit cut it off.
    """
    values_NS = trained_columns(values_T.double(), mask_T, lengths_S)
    next_values_NS = torch.cat([values_NS[1:], torch.zeros_like(values_NS[:1])])
    deltas_NS = trained_columns(rewards_T.double(), mask_T, lengths_S) + gamma * next_values_NS - values_NS
    advantages_NS = torch.empty_like(deltas_NS)
    following_S = torch.zeros_like(lengths_S, dtype=torch.float64)
    for n in reversed(range(len(deltas_NS))):
        following_S = deltas_NS[n] + gamma * lam * following_S
        advantages_NS[n] = following_S
    advantages_T = from_trained_columns(advantages_NS, mask_T, lengths_S)
    returns_T = from_trained_columns(advantages_NS + values_NS, mask_T, lengths_S)
    return advantages_T.to(values_T.dtype), returns_T.to(values_T.dtype)


# -- without a critic: returns against a baseline ----------------------------------------------------------------------


def discounted_returns(rewards_T: Tensor, mask_T: Tensor, lengths_S: Tensor, *, gamma: float) -> Tensor:
    """Returns [T]: `R_t = r_t + gamma R_t+1`.

    With the KL in the reward and whitened, REINFORCE++ (Hu 2025, where gamma is 1).
    """
    return gae(rewards_T, torch.zeros_like(rewards_T), mask_T, lengths_S, gamma=gamma, lam=1.0)[1]


def remax(rewards_T: Tensor, baselines_S: Tensor, mask_T: Tensor, lengths_S: Tensor, *, gamma: float) -> Tensor:
    """Returns [T]: the returns of the rewards, less the greedy answer's reward at the last action.

    ReMax, Li 2023, Algorithm 1.

    So the difference of the two rewards is discounted, as in the authors' code (liziniu/ReMax,
    step3_rlhf_finetuning/remax_trainer.py, compute_returns); there the last action is discounted once already.
    """
    above_T = rewards_T.clone()
    last_S = last_trained_position(mask_T, lengths_S)
    above_T[last_S[last_S >= 0]] -= baselines_S[last_S >= 0].to(rewards_T.dtype)
    return discounted_returns(above_T, mask_T, lengths_S, gamma=gamma)


# -- without a critic: a sample against its group ----------------------------------------------------------------------


def grpo(rewards_S: Tensor, groups_S: Tensor) -> Tensor:
    """Returns [S]: `(r_i - mean r) / (std r + 1e-6)` within a group (Shao 2024, section 4.1.2).

    The paper leaves the kind of std open: it is the sample's (G - 1 below), as in the public implementations.
    """
    return _within_groups(rewards_S, groups_S, lambda r_G: _centered(r_G) / (r_G.std() + 1e-6))


def group_mean(rewards_S: Tensor, groups_S: Tensor) -> Tensor:
    """Returns [S]: `r_i - mean r` within a group: Dr. GRPO (Liu 2025, section 3.2).

    Whitened, it is REINFORCE++ with baseline (Hu 2025).
    """
    return _within_groups(rewards_S, groups_S, _centered)


def rloo(rewards_S: Tensor, groups_S: Tensor) -> Tensor:
    """Returns [S]: `r_i` minus the mean of the others in its group (RLOO, Ahmadian 2024).

    It is G / (G - 1) times `group_mean`.
    """
    return _within_groups(rewards_S, groups_S, lambda r_G: _centered(r_G) * (len(r_G) / (len(r_G) - 1)))


def _within_groups(rewards_S: Tensor, groups_S: Tensor, advantage: Callable[[Tensor], Tensor]) -> Tensor:
    """Applies `advantage` to the rewards [G] (fp64) of each group of at least two; 0 for a group of one."""
    assert rewards_S.shape == groups_S.shape, f"rewards {tuple(rewards_S.shape)}, groups {tuple(groups_S.shape)}"
    _, group_S, sizes = groups_S.unique(return_inverse=True, return_counts=True)
    result_S = torch.zeros_like(rewards_S)
    for members_G in group_S.argsort(stable=True).split(sizes.tolist()):
        if len(members_G) > 1:
            result_S[members_G] = advantage(rewards_S[members_G].double()).to(rewards_S.dtype)
    return result_S


def _centered(values: Tensor) -> Tensor:
    """Subtracts the mean, from the smallest on, so that equal values give exactly 0."""
    above = values - values.min()
    return above - above.mean()


# -- scaling -----------------------------------------------------------------------------------------------------------


def whiten(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """Returns [T]: `(x - mean) / sqrt(variance + 1e-8)` over all tokens in the mask, each once; 0 outside it.

    The variance is the population's; equal values give 0. REINFORCE++ calls it global batch normalization (Hu 2025).
    """
    trained_T = mask_T != 0
    result_T = torch.zeros_like(values_T)
    if trained_T.any():
        centered = _centered(values_T[trained_T].double())
        result_T[trained_T] = (centered / (centered.square().mean() + 1e-8).sqrt()).to(values_T.dtype)
    return result_T


# -- by name -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Estimator:
    """A way to compute advantages."""

    compute: Callable[[AdvantageInputs, float, float], tuple[Tensor, Tensor | None]]
    """(rollout, gamma, lam) -> advantages [T] and, with a critic, its targets [T]."""
    needs: Literal["values_T", "groups_S", "baselines_S"] | None = None  # the field of `AdvantageInputs`


def _of_group(estimate: Callable[[Tensor, Tensor], Tensor]) -> Estimator:
    def compute(rollout: AdvantageInputs, gamma: float, lam: float) -> tuple[Tensor, None]:
        advantages_T = to_tokens(estimate(rollout.scores_S, rollout.groups_S), rollout.lengths_S)
        return advantages_T.masked_fill(rollout.mask_T == 0, 0.0), None

    return Estimator(compute, "groups_S")


ESTIMATORS: Mapping[str, Estimator] = {
    "gae": Estimator(
        lambda r, gamma, lam: gae(r.rewards_T, r.values_T, r.mask_T, r.lengths_S, gamma=gamma, lam=lam), "values_T"
    ),
    "returns": Estimator(
        lambda r, gamma, lam: (discounted_returns(r.rewards_T, r.mask_T, r.lengths_S, gamma=gamma), None)
    ),
    "remax": Estimator(
        lambda r, gamma, lam: (remax(r.rewards_T, r.baselines_S, r.mask_T, r.lengths_S, gamma=gamma), None),
        "baselines_S",
    ),
    "grpo": _of_group(grpo),
    "group_mean": _of_group(group_mean),
    "rloo": _of_group(rloo),
}
"""`algorithm.advantage` -> how."""
