"""`algorithm.name`: which advantage, objective, aggregation and penalties make up each algorithm.

An algorithm is a row of `mrl.config.recipes`; every part of it can be replaced alone. A new row is all that an
algorithm of known parts needs. A new part is a function and its entry in one table: `advantages.ESTIMATORS`,
`policy.RATIOS`, `policy.OBJECTIVES`, `kl.KL_ESTIMATORS`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import Tensor

from mrl.algorithms.advantages import ESTIMATORS, AdvantageInputs, whiten
from mrl.algorithms.kl import KL_ESTIMATORS, KLController
from mrl.algorithms.losses import DENOMINATORS, ActorLoss, CriticLoss
from mrl.algorithms.policy import OBJECTIVES, RATIOS, Clip, Correction
from mrl.config.checks import refuse_unread
from mrl.config.ppo import AlgorithmConfig, PPOConfig
from mrl.config.ppo_checks import REWARD_METRICS, is_rewarded
from mrl.config.recipes import OPD_NAMES, ROWS
from mrl.errors import ConfigError, Shown


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Holds the parts of an algorithm. No field is ever None, so a config's None can mean "as the recipe says"."""

    advantage: str  # of `ESTIMATORS`
    objective: str = "clip"  # of `policy.OBJECTIVES`
    ratio: str = "token"  # of `policy.RATIOS`
    aggregation: str = "token_mean"  # of `losses.DENOMINATORS`; the critic's too
    whiten: bool = False  # advantages over the whole rollout
    gamma: float = 1.0  # discount
    lam: float = 0.95  # GAE's lambda
    clip_low: float = 0.2  # see `policy.Clip`
    clip_high: float = 0.2
    dual_clip: float = 0.0  # 0: none
    value_clip: float = 0.2  # 0: none
    kl_in: str = "none"  # what the KL penalty is part of: none, reward or loss; exact: of distributions, in the loss
    kl_estimator: str = "k3"
    kl_cap: float = 0.0  # 0: none
    kl_coef: float = 0.0
    kl_target: float = 0.0  # nats per sequence that the coefficient is steered to; 0: it is fixed
    kl_gain: float = 0.1  # how fast it is steered
    entropy_coef: float = 0.0  # of the bonus
    correction: Literal["none", "truncate", "mask"] = "none"  # for the sampler's probabilities (see `policy`)
    correction_level: Literal["token", "sequence"] = "token"
    correction_cap: float = 2.0
    correction_floor: float = 0.0
    dynamic_sampling: bool = False  # groups without differences are sampled anew
    overlong_fraction: float = 0.0  # the last part of the length limit, over which the punishment grows; 0: none

    @property
    def needs_critic(self) -> bool:
        return ESTIMATORS[self.advantage].needs == "values_T"

    @property
    def needs_groups(self) -> bool:
        """Whether several samples of a prompt are compared: with one, every advantage is 0."""
        return ESTIMATORS[self.advantage].needs == "groups_S" or self.dynamic_sampling

    @property
    def needs_greedy_answer(self) -> bool:
        return ESTIMATORS[self.advantage].needs == "baselines_S"

    @property
    def needs_reference(self) -> bool:
        return self.kl_in != "none"


RECIPES: Mapping[str, Recipe] = {name: Recipe(**row) for name, row in ROWS.items()}

CHOICES: Mapping[str, tuple[str, ...]] = {
    "advantage": tuple(ESTIMATORS),
    "objective": tuple(OBJECTIVES),
    "ratio": tuple(RATIOS),
    "aggregation": tuple(DENOMINATORS),
    "kl_in": ("none", "reward", "loss"),
    "kl_estimator": tuple(KL_ESTIMATORS),
    "correction": ("none", "truncate", "mask"),
    "correction_level": ("token", "sequence"),
}
"""What each named part may be."""

KEY_READERS: Mapping[str, tuple[str, Callable[[Recipe], bool]]] = {
    "gamma": ("algorithm.advantage: gae, returns or remax", lambda r: r.advantage in ("gae", "returns", "remax")),
    "lam": ("algorithm.advantage: gae", lambda r: r.advantage == "gae"),
    "clip_low": ("algorithm.objective: clip or cispo", lambda r: r.objective in ("clip", "cispo")),
    "clip_high": ("algorithm.objective: clip or cispo", lambda r: r.objective in ("clip", "cispo")),
    "dual_clip": ("algorithm.objective: clip", lambda r: r.objective == "clip"),
    "value_clip": ("algorithm.advantage: gae", lambda r: r.needs_critic),
    "kl_estimator": ("algorithm.kl_in: reward or loss", lambda r: r.kl_in in ("reward", "loss")),
    "kl_cap": (
        "algorithm.kl_in: reward or loss and algorithm.kl_estimator: k3",
        lambda r: r.kl_in in ("reward", "loss") and r.kl_estimator == "k3",
    ),
    "kl_coef": ("algorithm.kl_in: reward or loss", lambda r: r.kl_in != "none"),
    "kl_target": ("algorithm.kl_in: reward or loss", lambda r: r.kl_in != "none"),
    "kl_gain": ("algorithm.kl_target above 0", lambda r: r.kl_in != "none" and r.kl_target > 0),
    "correction_level": ("algorithm.correction: truncate or mask", lambda r: r.correction != "none"),
    "correction_cap": ("algorithm.correction: truncate or mask", lambda r: r.correction != "none"),
    "correction_floor": ("algorithm.correction: mask", lambda r: r.correction == "mask"),
}
"""A part that only counts beside another one, and with which."""


def recipe(name: str, overrides: Mapping[str, Any] | None = None, *, distill: bool = False) -> Recipe:
    """Returns the recipe `name` with the parts that `overrides` names (None: as it is).

    distill: the divergence from a teacher's distributions is minimized itself, and its sampled KL is no reward.

    Raises ConfigError for an unknown name, and for a part that nothing would read.
    """
    if name not in RECIPES:
        raise _unknown("algorithm.name", name, tuple(RECIPES))
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    made = dataclasses.replace(RECIPES[name], **(given | ({"kl_in": "exact"} if distill else {})))
    for key, choices in CHOICES.items():
        if getattr(made, key) not in choices and not (distill and key == "kl_in"):
            raise _unknown(f"algorithm.{key}", getattr(made, key), choices)
    for key, value in given.items():
        needed, is_read = KEY_READERS.get(key, ("", lambda _: True))
        if not is_read(made):
            why = f"would not be read by this {name}; it goes with {needed}"
            raise ConfigError(f"algorithm.{key}", value, why, "leave it out")
    if made.kl_coef == 0 and "kl_coef" not in given and (made.kl_in != "none" or made.kl_target):
        raise ConfigError("algorithm.kl_in", made.kl_in, f"has no coefficient in {name}", "set algorithm.kl_coef")
    return made


def in_words(recipe: Recipe) -> str:
    """Returns every part that is read, as "advantage=grpo, objective=clip, ...": what a name and null keys come to."""
    unread = {key for key, (_, is_read) in KEY_READERS.items() if not is_read(recipe)}
    parts = ((name, value) for name, value in dataclasses.asdict(recipe).items() if name not in unread)
    return ", ".join(f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in parts)


def _unknown(key: str, value: Any, choices: tuple[str, ...]) -> ConfigError:
    return ConfigError(key, value, "is not known", f"use one of {', '.join(choices)}")


def advantages(recipe: Recipe, rollout: AdvantageInputs) -> tuple[Tensor, Tensor | None]:
    """Returns advantages [T] of a whole rollout, and with a critic the returns [T] that it is trained on."""
    estimator = ESTIMATORS[recipe.advantage]
    assert estimator.needs is None or getattr(rollout, estimator.needs) is not None, f"without {estimator.needs}"
    advantages_T, returns_T = estimator.compute(rollout, recipe.gamma, recipe.lam)
    return (whiten(advantages_T, rollout.mask_T) if recipe.whiten else advantages_T), returns_T


def actor_loss(recipe: Recipe, *, max_response_length: int) -> ActorLoss:
    """Returns the actor's loss function, with the coefficient that the KL starts with."""
    correction = None
    if recipe.correction != "none":
        correction = Correction(
            recipe.correction, recipe.correction_level, recipe.correction_cap, recipe.correction_floor
        )
    return ActorLoss(
        aggregation=recipe.aggregation,
        fixed_length=max_response_length,
        objective=recipe.objective,
        ratio=recipe.ratio,
        clip=Clip(recipe.clip_low, recipe.clip_high, recipe.dual_clip),
        kl_coef=recipe.kl_coef if recipe.kl_in in ("loss", "exact") else 0.0,
        kl_estimator=recipe.kl_estimator,
        kl_cap=recipe.kl_cap,
        entropy_coef=recipe.entropy_coef,
        correction=correction,
    )


def critic_loss(recipe: Recipe, *, max_response_length: int) -> CriticLoss:
    """Returns the critic's loss function; summed and divided as the actor's is."""
    return CriticLoss(aggregation=recipe.aggregation, fixed_length=max_response_length, value_clip=recipe.value_clip)


def overlong_cache(recipe: Recipe, *, max_response_length: int) -> int:
    """Returns tokens before the limit over which `advantages.overlong_penalty` grows; 0 for no punishment."""
    return math.ceil(recipe.overlong_fraction * max_response_length)


def kl_controller(recipe: Recipe) -> KLController:
    """Returns the controller that holds the coefficient of the KL, wherever the KL is taken from."""
    return KLController(recipe.kl_coef, target=recipe.kl_target, gain=recipe.kl_gain)


# -- the algorithm of a config -----------------------------------------------------------------------------------------


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
