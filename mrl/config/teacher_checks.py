"""Checks of teachers, of `mrl sft` and `mrl ppo`, and of their names: pure arithmetic, before any process starts."""

from __future__ import annotations

from collections.abc import Collection

from mrl.config.checks import (
    check_backend,
    check_cache,
    check_micro_batch,
    check_never_trains,
    check_url,
    refuse_unread,
)
from mrl.config.ppo import PPOConfig, PromptsConfig, ReferenceConfig
from mrl.config.recipes import OPD_NAMES
from mrl.config.roles import is_served, section_of, teachers_of
from mrl.config.schema import DataConfig, DivergenceConfig, OneTeacherConfig, SFTConfig, TrainedModelConfig
from mrl.config.sources import PromptShare, SFTSource, sources_of
from mrl.errors import ConfigError, Shown


def check_teacher(config: SFTConfig) -> None:
    """Raises ConfigError where keys of `teacher` contradict each other or one would be left unread."""
    teacher = config.teacher
    check_names(config.data, {} if teacher is None else teacher.others, "teacher.others")
    if teacher is None:
        return
    check_divergence(teacher, "teacher", config.model, "model")
    check_first_name(teacher.others, "teacher")
    check_cache(config.data, "teacher.cache", teacher.cache)
    for key, one in teacher.by_key.items():
        _check_one(config, key, one)


def check_divergence(divergence: DivergenceConfig, path: str, model: TrainedModelConfig, of_model: str) -> None:
    """Raises ConfigError if the divergence at `path` does not go with the trained model, at `of_model`."""
    if model.mtp is not None:
        why = "predicts one label for each token, and a teacher compares several"
        raise ConfigError(f"{of_model}.mtp", model.mtp, why, f"leave out it or {path}")
    if divergence.loss != "jsd":
        refuse_unread(divergence, path, f"by {path}.loss {divergence.loss}", "leave it out; it is of jsd", ("beta",))


def check_first_name(others: Collection[str], name: str) -> None:
    """Raises ConfigError if another teacher has the name that metrics give the first one."""
    if name in others:
        raise ConfigError(f"{name}.others", name, f"is the name of the teacher in {name}.model", "give another")


def _check_one(config: SFTConfig, key: str, teacher: OneTeacherConfig) -> None:
    """Checks the server or the engine of one teacher. key: of its section."""
    assert config.teacher is not None, "no teacher"
    if teacher.server is not None:
        keys = config.teacher
        check_server(key, teacher, ("teacher.top_k", keys.top_k), ("teacher.temperature", keys.temperature))
        return
    if teacher.engine is not None:
        length = config.data.max_length
        check_micro_batch(teacher.engine.micro_batch, length, f"data.max_length {length}", f"{key}.engine")
        check_never_trains(teacher.engine, f"{key}.engine", "the teacher")
        check_backend(config.teacher_model(teacher.model), teacher.engine, key)


def check_names(data: DataConfig | PromptsConfig, others: Collection[str], of: str) -> None:
    """Raises ConfigError if a source names an unknown teacher. others: the names there are. of: their key."""
    given = {"data.teacher": data.teacher}
    for key, source in sources_of(data):
        if isinstance(source, SFTSource | PromptShare):
            given[f"{key}.teacher"] = source.teacher
    for key, name in given.items():
        if name is not None and name not in others:
            known = f"give one of {', '.join(others)}" if others else "give it there, as {math: {model: {path: DIR}}}"
            raise ConfigError(key, name, f"is no teacher of {of}", known)


def check_server(
    key: str,
    teacher: OneTeacherConfig | ReferenceConfig,
    top_k: tuple[str, int | None] | None,
    temperature: tuple[str, float],
) -> None:
    """Raises ConfigError if a server cannot give the answers.

    top_k: key and value, None if no other tokens are compared. temperature: key and value.
    """
    server = teacher.server
    assert server is not None, "no server"
    refuse_unread(teacher, key, f"beside {key}.server", "leave one of them out", ("engine",))
    if teacher.model.dtype is not None:
        why = f"is not used beside {key}.server, which has its own"
        raise ConfigError(f"{key}.model.dtype", teacher.model.dtype, why, "leave it out")
    if top_k is not None and top_k[1] is None:
        why = "is the whole vocabulary, which no server gives"
        raise ConfigError(top_k[0], None, why, f"give 20, which servers give by default, or use {key}.engine")
    if temperature[1] != 1:
        why = "is not what a server's log-probs are taken at, which is 1"
        raise ConfigError(temperature[0], Shown(f"{temperature[1]:g}"), why, f"set it to 1, or use {key}.engine")
    check_url(f"{key}.server.url", server.url)


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
