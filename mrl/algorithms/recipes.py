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
from mrl.algorithms.aggregation import DENOMINATORS
from mrl.algorithms.correction import Correction
from mrl.algorithms.kl import KL_ESTIMATORS, KLController
from mrl.algorithms.losses import ActorLoss, CriticLoss
from mrl.algorithms.policy import OBJECTIVES, RATIOS, Clip
from mrl.config.recipes import ROWS
from mrl.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Holds the parts of an algorithm. No field is ever None, so a config's None can mean "as the recipe says"."""

    advantage: str  # of `ESTIMATORS`
    objective: str = "clip"  # of `policy.OBJECTIVES`
    ratio: str = "token"  # of `policy.RATIOS`
    aggregation: str = "token_mean"  # of `aggregation.DENOMINATORS`; the critic's too
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
    correction: Literal["none", "truncate", "mask"] = (
        "none"  # for the sampler's probabilities: none, truncate or mask (see `correction`)
    )
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
    """Returns tokens before the limit over which `shaping.overlong_penalty` grows; 0 for no punishment."""
    return math.ceil(recipe.overlong_fraction * max_response_length)


def kl_controller(recipe: Recipe) -> KLController:
    """Returns the controller that holds the coefficient of the KL, wherever the KL is taken from."""
    return KLController(recipe.kl_coef, target=recipe.kl_target, gain=recipe.kl_gain)
