"""Checks of the teachers of on-policy distillation (algorithm opd): pure arithmetic, before any process starts."""

from __future__ import annotations

from mrl.config.ppo import PPOConfig
from mrl.config.recipes import OPD_NAMES
from mrl.config.roles import is_served, section_of, teachers_of
from mrl.config.teacher_checks import check_divergence, check_first_name, check_names, check_server
from mrl.errors import ConfigError


def check_opd(config: PPOConfig) -> None:
    """Raises ConfigError where keys of on-policy distillation contradict each other or one would be left unread.

    The teacher is the reference, beside which others may stand; all stay what they are.
    """
    name, algorithm, reference = config.algorithm.name, config.algorithm, config.reference
    if name not in OPD_NAMES:
        own = {
            "algorithm.distill": algorithm.distill,
            "reference.server": reference.server,
            "reference.others": reference.others or None,
        }
        for key in (key for key, value in own.items() if value is not None):
            why = f"is given, and algorithm.name {name} has no teacher"
            raise ConfigError(key, why=why, fix="leave it out, or set algorithm.name to opd")
    check_names(config.data, reference.others, "reference.others")
    if name not in OPD_NAMES:
        return
    allowed = (None,) if algorithm.distill is not None else (None, "reward")
    if algorithm.kl_in not in allowed:
        why = f"is not what algorithm.name {name} minimizes, the distance to the teacher"
        raise ConfigError("algorithm.kl_in", algorithm.kl_in, why, "leave it out")
    if reference.model.path is None:
        why = f"leaves algorithm.name {name} no teacher"
        raise ConfigError("reference.model.path", None, why, "give the folder of one, with the actor's tokenizer")
    if reference.update_every is not None:
        why = f"would make the actor its own teacher, with algorithm.name {name}"
        raise ConfigError("reference.update_every", reference.update_every, why, "leave it out")
    if algorithm.distill is not None:
        check_divergence(algorithm.distill, "algorithm.distill", config.actor.model, "actor.model")
    check_first_name(reference.others, "reference")
    temperature = ("rollout.temperature", config.rollout.temperature)
    ids = None if algorithm.distill is None else ("algorithm.distill.top_k", algorithm.distill.top_k)
    for role in teachers_of(config):
        if is_served(config, role):
            check_server(role, section_of(config, role), ids, temperature)
