"""Checks of the section `teacher` of `mrl sft`: pure arithmetic, before any process starts."""

from __future__ import annotations

from mrl.config.checks import check_backend, check_micro_batch
from mrl.config.keys import changed
from mrl.config.ppo_checks import check_never_trains, refuse_unread
from mrl.config.schema import SFTConfig, TeacherConfig
from mrl.errors import ConfigError, Shown


def check_teacher(config: SFTConfig) -> None:
    """Raises ConfigError where keys of `teacher` contradict each other or one would be left unread."""
    teacher = config.teacher
    if teacher is None:
        return
    if config.model.mtp is not None:
        why = "predicts one label for each token, and a teacher compares several"
        raise ConfigError("model.mtp", config.model.mtp, why, "leave out it or teacher")
    if teacher.beta is not None and teacher.loss != "jsd":
        why = f"is not read by teacher.loss {teacher.loss}"
        raise ConfigError("teacher.beta", Shown(f"{teacher.beta:g}"), why, "leave it out; it is of jsd")
    if teacher.server is not None:
        _check_server(teacher)
        return
    if teacher.engine is not None:
        length = config.data.max_length
        check_micro_batch(teacher.engine.micro_batch, length, f"data.max_length {length}", "teacher.engine")
        check_never_trains(teacher.engine, "teacher.engine", "the teacher")
        check_backend(config.teacher_model, teacher.engine, "teacher")


def _check_server(teacher: TeacherConfig) -> None:
    """What a server is not asked for, and what it cannot give."""
    assert teacher.server is not None, "no server"
    unread = (pair for pair in changed(teacher, "teacher") if pair[0].path == "teacher.engine")
    refuse_unread(unread, "beside teacher.server", "leave one of them out")
    if teacher.model.dtype is not None:
        why = "is not used beside teacher.server, which has its own"
        raise ConfigError("teacher.model.dtype", teacher.model.dtype, why, "leave it out")
    if teacher.top_k is None:
        why = "is the whole vocabulary, which no server gives"
        raise ConfigError("teacher.top_k", None, why, "give 20, which servers give by default, or use teacher.engine")
    if teacher.temperature != 1:
        why = "is not what a server's log-probs are taken at, which is 1"
        shown = Shown(f"{teacher.temperature:g}")
        raise ConfigError("teacher.temperature", shown, why, "set it to 1, or use teacher.engine")
    if not teacher.server.url.startswith(("http://", "https://")):
        raise ConfigError("teacher.server.url", teacher.server.url, "is no URL", "write it as http://host:8000")
