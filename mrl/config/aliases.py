"""What other trainers call our keys: an unknown key of such a name is told ours."""

from __future__ import annotations

from collections.abc import Mapping

ALIASES: Mapping[str, tuple[str, ...]] = {
    # TRL's GRPOConfig.
    "algorithm.beta": ("algorithm.kl_coef",),
    "algorithm.epsilon": ("algorithm.clip_low", "algorithm.clip_high"),
    "algorithm.epsilon_high": ("algorithm.clip_high",),
    "algorithm.num_generations": ("rollout.samples_per_prompt",),
    "rollout.num_generations": ("rollout.samples_per_prompt",),
    # verl's actor_rollout_ref.rollout.
    "rollout.n": ("rollout.samples_per_prompt",),
}
"""Dotted key that is none -> the keys that do what is meant. Used where the command has these keys."""
