"""`mrl sft`: supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mrl.config.command import Part, TrainingCommand
from mrl.config.schema import SFTConfig
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
    checked = "mrl.check.of_sft:CHECKED"
    order = 1

    def check(self, config: SFTConfig) -> None:
        from mrl.config.checks import check_config

        check_config(config)

    def recognise(self, raw: Mapping[str, Any]) -> str | None:
        if "model" in raw and not {"actor", "algorithm", "loss"} & raw.keys():
            return "fine-tuning (model is not in the section actor)"
        return None

    def parts(self, config: SFTConfig) -> list[Part]:
        return [Part("", config.model, config.engine, optimizer=config.optimizer)]

    def longest(self, config: SFTConfig) -> tuple[int, str]:
        return config.data.max_length, "data.max_length"

    def describe(self, config: SFTConfig, parts: Sequence[Part], layouts: Sequence[ParallelDims]) -> list[str]:
        from mrl.launch.describe import micro_batch, processes

        [dims], train = layouts, config.train
        length = f"{train.steps} steps" if train.steps is not None else f"{train.resolved_epochs:g} epochs"
        return [
            f"layout: {dims.describe()} on {processes(dims)}",
            f"micro-batch: {micro_batch(config.engine, config.data.max_length)}",
            f"length: {length} of {train.global_batch_size} sequences a step",
        ]


COMMAND = SFT()
