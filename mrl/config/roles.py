"""The roles of `mrl ppo`: those of a run, and the config of each one's engine.

The actor is the trained policy. The critic estimates values. The KL is measured against the reference. The reward is a
model that scores. A key that is null in a role has the actor's value. A role has the name of its section, so teachers
of on-policy distillation after the first are `reference.others.NAME`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from mrl.config.checks import micro_batch_tokens
from mrl.config.ppo import PPOConfig
from mrl.config.recipes import OPD_NAMES
from mrl.config.schema import EngineConfig, ModelConfig, ParallelConfig, RoleConfig
from mrl.errors import ConfigError, ModelError
from mrl.words import pluralize

ROLES = ("actor", "critic", "reference", "reward")
TRAINED = ("actor", "critic")


def teachers_of(config: PPOConfig) -> tuple[str, ...]:
    """Returns the reference and what stands beside it, each of which other rows may name, in the order of their
    numbers."""
    return ("reference", *(f"reference.others.{name}" for name in config.reference.others))


def teacher_names(config: PPOConfig) -> list[str] | None:
    """Returns the names of all teachers but the first; rows may give them. None if the algorithm has no teacher."""
    return list(config.reference.others) if config.algorithm.name in OPD_NAMES else None


def frozen_roles(config: PPOConfig) -> tuple[str, ...]:
    """Returns roles that keep the weights of their folders, so no checkpoint needs to hold them."""
    starts_anew = config.reference.model.path is None and config.actor.model.init != "pretrained"
    changes = starts_anew or config.reference.update_every is not None
    return ("reward",) if changes else ("reward", *teachers_of(config))


def possible_roles(config: PPOConfig) -> tuple[str, ...]:
    """Returns the roles that a run may have."""
    return ("actor", "critic", *teachers_of(config), "reward")


def section_of(config: PPOConfig, role: str) -> Any:
    """Returns the section of a role."""
    name = role.removeprefix("reference.others.")
    return getattr(config, role) if name == role else config.reference.others[name]


def is_served(config: PPOConfig, role: str) -> bool:
    """Returns whether a server has the role's model, and no engine here."""
    return role.startswith("reference") and section_of(config, role).server is not None


def roles_of(config: PPOConfig, recipe: Any) -> tuple[str, ...]:
    """Returns the roles of the run, also those on servers, in the order of `possible_roles`.

    recipe: a `mrl.algorithms.recipes.Recipe`, which imports torch.
    """
    has = {
        "actor": True,
        "critic": recipe.needs_critic,
        **dict.fromkeys(teachers_of(config), recipe.needs_reference),
        "reward": config.reward.model.path is not None,
    }
    return tuple(role for role in possible_roles(config) if has[role])


def has_own_engine(config: PPOConfig, role: str) -> bool:
    """Returns whether the role's section names an engine; otherwise the actor's serves for it."""
    return section_of(config, role).engine is not None


def engine_of(config: PPOConfig, role: str) -> EngineConfig:
    """Returns the role's engine as the config has it, or the actor's."""
    engine: EngineConfig | None = section_of(config, role).engine
    return engine or config.actor.engine


def model_of(config: PPOConfig, role: str) -> ModelConfig:
    """Returns the role's model. One of another path has weights; of the actor's path it starts as the actor does."""
    actor = config.actor.model
    if role == "actor":
        return actor
    own = section_of(config, role).model
    lora = config.critic.model.lora if role == "critic" else None
    made = dataclasses.replace(actor, dtype=own.dtype or actor.dtype, lora=lora, mtp=None)
    return made if own.path is None else dataclasses.replace(made, path=own.path, init="pretrained")


def reference_is_base(config: PPOConfig) -> bool:
    """Returns whether the reference is the actor without its adapters: no model of its own, and none that would
    change."""
    own = config.reference
    same_model = own.model.path is None and own.model.dtype in (None, config.actor.model.dtype)
    return config.actor.model.lora is not None and same_model and own.engine is None and own.update_every is None


def role_configs(config: PPOConfig, folders: Mapping[str, str], recipe: Any) -> dict[str, RoleConfig]:
    """Returns what each engine of the run is built from, by role. folders: the folder that each role's model path
    stands for.

    A reference that is the actor's base has none of its own. The length of the learning-rate schedules is set later, by
    `engine.set_total_steps`."""
    made: dict[str, RoleConfig] = {}
    for role in roles_of(config, recipe):
        if (role == "reference" and reference_is_base(config)) or is_served(config, role):
            continue
        engine = engine_of(config, role)
        tokens = micro_batch_tokens(engine.micro_batch, config.max_length)
        made[role] = RoleConfig(
            model=dataclasses.replace(model_of(config, role), path=folders[role]),
            engine=dataclasses.replace(engine, micro_batch=dataclasses.replace(engine.micro_batch, tokens=tokens)),
            optimizer=getattr(config, role).optimizer if role in TRAINED else None,
            seed=config.seed,
            head="value" if role in ("critic", "reward") else "lm",
            packing=config.data.packing,
            mtp=config.actor.model.mtp if role == "actor" else None,
        )
    return made


def sampling_engine(config: PPOConfig) -> EngineConfig:
    """Returns the engine of the ranks of `rollout.ranks`: the actor's, in a layout of its own."""
    engine = config.actor.engine
    return dataclasses.replace(
        engine, parallel=ParallelConfig(tp=config.rollout.server.tp), offload=(), cuda_graphs=False,
        fsdp=dataclasses.replace(engine.fsdp, replicate=1),
    )  # fmt: skip


def describe_sampling(config: PPOConfig, world_size: int, *, gpu: bool) -> str | None:
    """Returns a line on what samples beside the actor's own engine; None if nothing does.

    world_size: the processes that train. gpu: whether they may be on GPUs.
    """
    rollout, server = config.rollout, config.rollout.server
    if rollout.ranks:
        models = f"{pluralize(rollout.ranks // server.tp, 'model')} of tp {server.tp}"
        if config.actor.engine.backend == "fsdp":
            models = "1 model"
        return f"rollout: {pluralize(rollout.ranks, 'process', 'processes')} of its own, {models}"
    if server.urls:
        return f"rollout: {rollout.backend} at {', '.join(server.urls)}"
    if not rollout.vllm_inside:
        return None
    engines = f"{pluralize(world_size // server.tp, 'engine')} of tp {server.tp}"
    memory = f", with {server.memory_fraction:g} of each GPU's memory while sampling" if gpu else ""
    return f"rollout: vLLM inside the trainer, {engines}{memory}"


def rewrite_role_error_keys(config: PPOConfig, role: str) -> contextlib.AbstractContextManager[None]:
    """Returns the context of `rewrite_error_keys` for a role of `mrl ppo`."""
    return rewrite_error_keys(role, has_engine=has_own_engine(config, role), of="actor")


@contextlib.contextmanager
def rewrite_error_keys(role: str, *, has_engine: bool, of: str) -> Iterator[None]:
    """Rewrites errors inside: a key of an engine or a model becomes the role's own key.

    has_engine: the role's section names one; otherwise the role has the engine of `of`.

    An engine of another package may raise an error without a key. It gets the name of the role. An error about the
    model's files gets the name of its section, or the key of their path if it begins with that path.
    """
    try:
        yield
    except (ConfigError, ModelError) as error:
        section = None if error.key is None else "" if "/" in error.key else error.key.partition(".")[0]  # or a path
        if section == "engine" and not has_engine:
            why = f"is the {of}'s engine, which does not fit: {error}"
            raise type(error)(f"{role}.engine", None, why) from None
        if section in ("engine", "model"):
            raise error.under(role) from None
        if section is None or error.key == "config.json":
            at = f"{role}.model" if isinstance(error, ModelError) else role
            raise type(error)(at, why=str(error)) from None
        if isinstance(error, ModelError):
            raise ModelError(f"{role}.model.path", why=str(error)) from None
        raise
