"""`mrl dpo`: training on preferences."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from mrl.config.command import (
    Part,
    Phase,
    Phases,
    TrainingCommand,
    describe_layout,
    describe_length,
    describe_micro_batch,
)
from mrl.config.dpo import ROWS, DPOConfig, check_dpo
from mrl.config.roles import rewrite_error_keys
from mrl.parallel import ParallelDims


class DPO(TrainingCommand[DPOConfig]):
    name = "dpo"
    help = """Train a model on the preferences that the YAML file CONFIG names.

    loss.name chooses the loss: dpo, ipo, kto, orpo or simpo. KEY=VALUE sets any config key, as in loss.beta=0.05;
    `mrl config` lists them.
    """
    examples = """
        mrl dpo dpo.yaml
        mrl dpo dpo.yaml loss.name=simpo
        mrl dpo dpo.yaml reference.cache=true engine.parallel.tp=2 --nproc 4
        mrl dpo dpo.yaml --dry-run"""
    root = DPOConfig
    trainer = "mrl.trainers.dpo:run"
    task = "mrl.trainers.dpo:DPOTask"
    checked = "mrl.check.steps:DPO"
    order = 3
    null_fallbacks = {
        "reference.engine": "engine",
        "reference.model.path": "model.path",
        "reference.model.dtype": "model.dtype",
    }

    def check(self, config: DPOConfig) -> None:
        check_dpo(config)

    def null_values(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        return {f"loss.{name}": value for name, value in ROWS[data["loss"]["name"]].items()}

    def parts(self, config: DPOConfig) -> list[Part]:
        own = config.reference.engine or config.engine
        return [
            Part("", config.model, config.engine, optimizer=config.optimizer),
            Part("reference", config.reference_model, own),
        ]

    def needed(self, config: DPOConfig) -> list[str]:
        cached_by_model = config.reference.cache and config.reference_is_start
        return ["", "reference"] if config.reference_has_own_model and not cached_by_model else [""]

    def rewrite_error_keys(self, config: DPOConfig, role: str) -> contextlib.AbstractContextManager[None]:
        if not role:
            return contextlib.nullcontext()
        return rewrite_error_keys(role, has_engine=config.reference.engine is not None, of="model")

    def longest(self, config: DPOConfig) -> tuple[int, str]:
        return config.data.max_length, "data.max_length"

    def longest_group(self, config: DPOConfig) -> int:
        return config.longest_group[0]

    def describe(self, config: DPOConfig, parts: Sequence[Part], layouts: Sequence[ParallelDims]) -> list[str]:
        train, longest = config.train, config.longest_group[0]
        lines = [
            f"{part.role or 'layout'}: {describe_layout(dims)}, micro-batches of "
            f"{describe_micro_batch(part.engine, longest)}"
            for part, dims in zip(parts, layouts, strict=True)
        ]
        numbers = ", ".join(f"{name} {value}" for name, value in config.loss.resolved.items())
        return [
            *lines,
            f"loss: {config.loss.name} ({numbers})",
            f"reference: {self._reference(config)}",
            f"length: {describe_length(train)} of {train.global_batch_size} rows a step",
        ]

    def _reference(self, config: DPOConfig) -> str:
        if not config.loss.needs_reference:
            return "none"
        if config.reference.cache:
            return "its log-probs of all rows are computed before the first step"
        return "a model of its own" if config.reference_has_own_model else "the model without its adapters"

    def phases(self, config: DPOConfig) -> Phases:
        sequences = config.train.global_batch_size * config.sequences_of_row
        role = "reference" if config.reference_has_own_model else ""
        found = []
        if not config.loss.is_paired:  # kto's KL is of prompts with other rows' answers
            found.append(Phase("forward of the model on other answers", "", "forward", sequences))
            found.append(Phase("forward of the reference on other answers", role, "forward", sequences))
        if config.loss.needs_reference and not config.reference.cache:
            found.append(Phase("forward of the reference", role, "forward", sequences))
        found.append(Phase("update of the model", "", "train", sequences))
        notes = []
        if config.sequences_of_row == 1 and "auto" in config.formats_of_train:
            notes.append("Rows are taken for single answers; with data.format=preference, for pairs.")
        if config.loss.needs_reference and config.reference.cache:
            notes.append("The reference's forward of all rows before the first step (reference.cache) is in no step.")
        return Phases(tuple(found), offload_idle=False, notes=tuple(notes))


COMMAND = DPO()
