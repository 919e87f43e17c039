"""The algorithm of a config, and the checks that need to know it."""

from __future__ import annotations

import dataclasses

from mrl.algorithms.recipes import Recipe, recipe
from mrl.config.checks import refuse_unread
from mrl.config.ppo import AlgorithmConfig, PPOConfig
from mrl.config.ppo_checks import REWARD_METRICS, is_rewarded
from mrl.config.recipes import OPD_NAMES
from mrl.errors import ConfigError, Shown

PARTS = tuple(field.name for field in dataclasses.fields(Recipe))
"""The keys of `algorithm` that replace a part of the recipe; null leaves it as the recipe has it."""


POLICY_KEYS = (
    "advantage", "objective", "ratio", "whiten", "gamma", "lam", "clip_low", "clip_high", "dual_clip", "value_clip",
    "correction", "correction_level", "correction_cap", "correction_floor",
)  # fmt: skip
"""The keys of `algorithm` that turn rewards into the policy's objective, which is 0 where nothing is rewarded."""


def configured_recipe(algorithm: AlgorithmConfig, *, async_level: int = 0) -> Recipe:
    """Returns the recipe of `algorithm.name` with the parts that the other keys replace. Raises ConfigError.

    async_level: of the rollout. Samples of older weights are corrected.
    """
    parts = {name: getattr(algorithm, name) for name in PARTS}
    if async_level and parts["correction"] is None:
        parts["correction"] = "truncate"
    return recipe(algorithm.name, parts, distill=algorithm.distill is not None)


def check_algorithm(config: PPOConfig) -> Recipe:
    """Returns the recipe. Raises ConfigError if keys contradict the algorithm or it leaves one unread."""
    algorithm = config.algorithm
    made = configured_recipe(algorithm, async_level=config.rollout.async_level)
    _check_parts(made)
    if config.rollout.async_level and algorithm.distill is not None:
        why = "gives samples of older weights (rollout.async_level) the weight of new ones"
        raise ConfigError("algorithm.distill", why=why, fix="leave out one of them")
    if config.rollout.async_level > 1 and made.dynamic_sampling:
        why = "has the prompts of a rollout follow from the rounds of the one before, which is sampled at the same time"
        fix = "set it to 1, or algorithm.dynamic_sampling to false"
        raise ConfigError("rollout.async_level", config.rollout.async_level, why, fix)
    if config.rollout.async_level and made.dynamic_sampling and config.reward.model.path is not None:
        why = "needs every score before the next round, and with rollout.async_level the reward model scores after all"
        raise ConfigError("algorithm.dynamic_sampling", True, why, "leave out one of the three")
    _check_unrewarded(config, made)
    if made.objective == "policy_gradient" and config.steps_per_iteration > 1:
        raise ConfigError(
            "algorithm.objective",
            "policy_gradient",
            (
                "is right for one step on a rollout, and algorithm.epochs and mini_batch_size make "
                f"{config.steps_per_iteration} of it"
            ),
            "use clip, or one epoch of one mini-batch",
        )
    if made.needs_groups and config.rollout.samples_per_prompt < 2:
        raise ConfigError(
            "rollout.samples_per_prompt",
            config.rollout.samples_per_prompt,
            f"leaves nothing to compare, and algorithm.name {algorithm.name} compares the samples of a prompt",
            "give at least 2",
        )
    advice = f"leave it out, or choose another algorithm than {algorithm.name}"
    if not made.needs_critic:
        no_critic = f"without a critic, and algorithm.advantage {made.advantage} needs none"
        refuse_unread(algorithm, "algorithm", no_critic, advice, ("critic_warmup",))
        refuse_unread(config.critic, "critic", no_critic, advice)
    if not made.needs_reference:
        no_kl = "without a reference, and algorithm.kl_in none needs none"
        refuse_unread(config.reference, "reference", no_kl, "leave it out, or set algorithm.kl_in")
    if not made.dynamic_sampling:
        fix = "leave it out, or set algorithm.dynamic_sampling"
        refuse_unread(algorithm, "algorithm", "without algorithm.dynamic_sampling", fix, ("max_sampling_rounds",))
    _check_best(config, made)
    return made


def _check_parts(made: Recipe) -> None:
    """Raises ConfigError for values that fit none of the others."""
    if 0 < made.dual_clip <= 1:
        raise ConfigError(
            "algorithm.dual_clip",
            Shown(f"{made.dual_clip:g}"),
            "is not above 1, and it bounds ratios above 1",
            "give 3, say, or 0 for none",
        )
    if made.correction == "mask" and made.correction_floor > made.correction_cap:
        raise ConfigError(
            "algorithm.correction_floor",
            Shown(f"{made.correction_floor:g}"),
            f"is above algorithm.correction_cap {made.correction_cap:g}",
            "give at most that",
        )


def _check_unrewarded(config: PPOConfig, made: Recipe) -> None:
    """Raises ConfigError for keys that need rewards, if a teacher is all there is to learn from."""
    if is_rewarded(config) or config.algorithm.name not in OPD_NAMES:
        return
    give = "leave it out, or give rewards.functions with a weight"
    if made.dynamic_sampling:
        why = "compares the rewards of a prompt's samples, and nothing is rewarded"
        raise ConfigError("algorithm.dynamic_sampling", True, why, give)
    if made.overlong_fraction:  # its penalty is a reward
        return
    if made.kl_coef == 0 and made.entropy_coef == 0:
        why = "leaves nothing to learn from: it weighs the teacher, and nothing is rewarded"
        raise ConfigError("algorithm.kl_coef", Shown("0"), why, f"give one above 0, {give}")
    if config.algorithm.distill is None:
        return
    for name in POLICY_KEYS:
        value = getattr(config.algorithm, name)
        if value is not None:
            shown = Shown(f"{value:g}") if isinstance(value, float) else value
            why = "is of the objective on rewards, and there are none beside algorithm.distill"
            raise ConfigError(f"algorithm.{name}", shown, why, give)


def _check_best(config: PPOConfig, made: Recipe) -> None:
    """Raises ConfigError for a best metric of a critic, a reference or a correction that the run has not."""
    best = config.checkpoint.best
    if best is None:
        return
    scored = is_rewarded(config) or config.rewards is not None or config.reward.model.path is not None
    of_eval = best.startswith("eval/") and best.endswith(("/accuracy", "/reward"))
    if (best in REWARD_METRICS and not is_rewarded(config)) or (of_eval and not scored):
        fix = "choose another metric, as actor/sequence_kl with checkpoint.best_is lowest"
        raise ConfigError("checkpoint.best", best, "is not measured where nothing is rewarded", fix)
    absent = (
        (best.startswith("critic/") and not made.needs_critic, "a critic"),
        (best in ("actor/kl", "actor/sequence_kl", "actor/kl_coef") and not made.needs_reference, "a reference"),
        (best.startswith("actor/importance_") and made.correction == "none", "algorithm.correction"),
        (best == "rollout/prompts_rejected" and not made.dynamic_sampling, "algorithm.dynamic_sampling"),
    )
    for is_absent, without in absent:
        if is_absent:
            raise ConfigError(
                "checkpoint.best", best, f"is not measured without {without}", "choose another metric, as reward/mean"
            )
