"""`mrl rm`: training of reward models."""

from __future__ import annotations

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
from mrl.config.rm import CENTERING, RMConfig, check_rm
from mrl.parallel import ParallelDims


class RM(TrainingCommand[RMConfig]):
    name = "rm"
    help = """Train a reward model on the rows that the YAML file CONFIG names.

    loss.name chooses the loss: bradley_terry on pairs, regression on graded answers, steps on labels of steps.
    KEY=VALUE sets any config key, as in loss.centering=0.01; `mrl config` lists them.
    """
    examples = """
        mrl rm rm.yaml
        mrl rm rm.yaml loss.centering=0.01
        mrl rm rm.yaml engine.parallel.tp=2 --nproc 4
        mrl rm rm.yaml --dry-run"""
    root = RMConfig
    trainer = "mrl.trainers.rm:run"
    task = "mrl.trainers.rm:RMTask"
    checked = "mrl.check.steps:RM"
    order = 4

    def check(self, config: RMConfig) -> None:
        check_rm(config)

    def null_values(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"loss.centering": CENTERING}

    def parts(self, config: RMConfig) -> list[Part]:
        return [Part("", config.model, config.engine, head="value", optimizer=config.optimizer)]

    def longest(self, config: RMConfig) -> tuple[int, str]:
        return config.data.max_length, "data.max_length"

    def longest_group(self, config: RMConfig) -> int:
        return config.longest_group[0]

    def describe(self, config: RMConfig, parts: Sequence[Part], layouts: Sequence[ParallelDims]) -> list[str]:
        [dims], train, loss = layouts, config.train, config.loss
        return [
            f"layout: {describe_layout(dims)}",
            f"micro-batch: {describe_micro_batch(config.engine, config.longest_group[0])}",
            f"loss: {loss.name}" + (f" (centering {loss.resolved_centering:g})" if loss.is_paired else ""),
            f"length: {describe_length(train)} of {train.global_batch_size} rows a step",
        ]

    def phases(self, config: RMConfig) -> Phases:
        sequences = config.train.global_batch_size * config.group
        return Phases((Phase("update of the model", "", "train", sequences),))


COMMAND = RM()
