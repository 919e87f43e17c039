"""`mrl sft`: supervised fine-tuning."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from mrl.config.checks import check_config
from mrl.config.command import (
    Distill,
    Part,
    Phase,
    Phases,
    TrainingCommand,
    describe_divergence,
    describe_layout,
    describe_length,
    describe_micro_batch,
)
from mrl.config.roles import rewrite_error_keys
from mrl.config.schema import JSD_BETA, SFTConfig
from mrl.parallel import ParallelDims


class SFT(TrainingCommand[SFTConfig]):
    name = "sft"
    help = """Fine-tune a model on the rows that the YAML file CONFIG names.

    KEY=VALUE sets any config key, as in train.steps=10; `mrl config` lists them.
    """
    examples = """
        mrl sft sft.yaml
        mrl sft sft.yaml train.steps=10 engine.parallel.tp=2 --nproc 4
        mrl sft sft.yaml --dry-run
        torchrun --nproc_per_node 8 -m mrl sft sft.yaml"""
    root = SFTConfig
    trainer = "mrl.trainers.sft:run"
    task = "mrl.trainers.sft:SFTTask"
    checked = "mrl.check.steps:SFT"
    order = 1
    null_fallbacks = {"teacher.engine": "engine", "teacher.model.dtype": "model.dtype"}

    def check(self, config: SFTConfig) -> None:
        from mrl.config.teacher_checks import check_teacher

        check_config(config)
        check_teacher(config)

    def null_values(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"teacher.beta": JSD_BETA}

    def parts(self, config: SFTConfig) -> list[Part]:
        parts = [Part("", config.model, config.engine, optimizer=config.optimizer)]
        for key, teacher in config.teacher.by_key.items() if config.teacher is not None else ():
            if teacher.server is None:
                parts.append(Part(key, config.teacher_model(teacher.model), teacher.engine or config.engine))
        return parts

    def rewrite_error_keys(self, config: SFTConfig, role: str) -> contextlib.AbstractContextManager[None]:
        if not role:
            return contextlib.nullcontext()
        assert config.teacher is not None, "no teacher"
        return rewrite_error_keys(role, has_engine=config.teacher.by_key[role].engine is not None, of="model")

    def longest(self, config: SFTConfig) -> tuple[int, str]:
        return config.data.max_length, "data.max_length"

    def describe(self, config: SFTConfig, parts: Sequence[Part], layouts: Sequence[ParallelDims]) -> list[str]:
        dims, train = layouts[0], config.train
        return [
            f"layout: {describe_layout(dims)}",
            f"micro-batch: {describe_micro_batch(config.engine, config.data.max_length)}",
            *self._teachers(config, dict(zip((part.role for part in parts), layouts, strict=True))),
            f"length: {describe_length(train)} of {train.global_batch_size} sequences a step",
        ]

    def _teachers(self, config: SFTConfig, layouts: Mapping[str, ParallelDims]) -> list[str]:
        """Returns lines on the teachers. layouts: of each part's role."""
        teacher = config.teacher
        if teacher is None:
            return []
        places = {
            key: f"at {one.server.url}" if one.server is not None
            else describe_layout(layouts[key])
            for key, one in teacher.by_key.items()
        }  # fmt: skip
        kind, ids = describe_divergence(teacher)
        when = ", computed before the first step" if teacher.cache else ""
        return [
            *(f"{key}: {where}{when}" for key, where in places.items()),
            f"loss: {teacher.weight:g} {kind} over {ids} at temperature {teacher.temperature:g}, "
            f"{1 - teacher.weight:g} negative log-likelihood",
        ]

    def phases(self, config: SFTConfig) -> Phases:
        size, teacher = config.train.global_batch_size, config.teacher
        if teacher is None:
            return super().phases(config)
        roles = [] if teacher.cache else [part.role for part in self.parts(config)[1:]]
        # of several teachers each may have to say something of all rows
        distill = Distill(teacher.loss, teacher.resolved_beta, teacher.top_k, teacher.temperature, 1.0)
        forwards = [
            Phase(f"forward of the {role.replace('.others.', ' ')}", role, "forward", size, distill=distill)
            for role in roles
        ]
        update = Phase("update of the model", "", "train", size, distill=distill)
        note = "A teacher's forward of its rows before the first step (teacher.cache) is in no step."
        return Phases((*forwards, update), offload_idle=False, notes=(note,) if teacher.cache else ())


COMMAND = SFT()
