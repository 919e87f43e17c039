"""Rewards before advantages: their tokens, penalties, and the groups that are worth training on.

Dimensions: `T` tokens of all sequences end to end, `S` sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.algorithms.ragged import last_trained_position


def token_rewards(
    scores_S: Tensor,
    mask_T: Tensor,
    lengths_S: Tensor,
    *,
    kl_T: Tensor | None = None,
    kl_coef: float = 0.0,
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
