"""Supervised fine-tuning, from a checked config to an exported model: its rows, its loss, its teachers.

The loop of steps is `loop` in rows.py. Not here: how the loss is divided (docs/loss.md), where rows come from
(mrl.data).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from mrl.algorithms.distill import metric_denominators
from mrl.algorithms.sft import sft_loss
from mrl.batch import Batch
from mrl.config.schema import RoleConfig, SFTConfig
from mrl.data.batches import batch_of, eval_batches
from mrl.data.dataset import Part, RowDataset, SFTDataset
from mrl.data.stream import Report
from mrl.data.vision import load_vision
from mrl.engine.base import Ctx
from mrl.errors import ConfigError
from mrl.roles.dispatch import WorkerDispatch
from mrl.roles.frozen import FrozenModel
from mrl.trainers.rows import HFConfig, Task, role_config, run_task
from mrl.trainers.teacher import Teachers
from mrl.trainers.trainer import Trainer
from mrl.weights.hf_config import vocab_size_of


class SFTTask(Task[SFTConfig]):
    """Supervised fine-tuning."""

    def __init__(self, config: SFTConfig) -> None:
        super().__init__(config)
        self.loss_fn = sft_loss
        self.teachers = None if config.teacher is None else Teachers(config)
        self.means = {} if self.teachers is None else metric_denominators(self.teachers.names)

    def role(self, folder: str) -> RoleConfig:
        config = self.config
        return role_config(
            config, folder, longest=config.data.max_length, optimizer=config.optimizer, mtp=config.model.mtp
        )

    def dataset(self, tokenizer: PreTrainedTokenizerBase, folder: str, hf_config: HFConfig, part: Part) -> SFTDataset:
        vision = load_vision(folder, hf_config)
        if self.teachers is not None and part == "train":
            if vision is not None:
                why = "is set, and model.path is a model that reads images, which is not distilled"
                raise ConfigError("teacher", why=why, fix="leave it out, or give a model of text alone")
            self.teachers.check(tokenizer, hf_config)
        others = None if self.config.teacher is None else list(self.config.teacher.others)
        return SFTDataset(
            self.config.data, tokenizer, part=part, vocab_size=vocab_size_of(hf_config), vision=vision, teachers=others,
            exchange=self.exchange,
        )  # fmt: skip

    def batch_of(self, rows: Sequence[Any]) -> Batch:
        return batch_of(rows)

    def eval_batches(self, dataset: RowDataset[Any], report: Report | None) -> Iterator[Batch]:
        return eval_batches(dataset, self.config.train.global_batch_size, report)

    def begin(self, trainer: Trainer, sets: Sequence[RowDataset[Any]]) -> None:
        if self.teachers is not None:
            self.loss_fn = self.teachers.loss_fn
            every = lambda: itertools.chain.from_iterable(self.eval_batches(rows, None) for rows in sets)  # noqa: E731
            self.teachers.begin(trainer, every)

    def frozen_models(self, folder: str) -> Mapping[str, FrozenModel]:
        return {} if self.teachers is None else self.teachers.frozen_models

    def prepare(self, dispatch: WorkerDispatch, batch: Batch) -> tuple[Batch, Ctx]:
        return (batch, {}) if self.teachers is None else self.teachers.prepare(batch)


def run(config: SFTConfig, command_line: str = "") -> None:
    """Trains as `run_task` does."""
    run_task(SFTTask(config), command_line)
