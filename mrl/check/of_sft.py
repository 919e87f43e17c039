"""Checks the step of `mrl sft`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from mrl.algorithms.sft import sft_loss
from mrl.check import reference
from mrl.check.command import CommandCheck, Subject
from mrl.check.folder import CheckedModel
from mrl.check.rows import Rows, first_rows
from mrl.config.command import Part
from mrl.config.schema import SFTConfig
from mrl.trainers.sft import SFTTask


class CheckedSFT(CommandCheck[SFTConfig]):
    def subjects(self, config: SFTConfig, parts: Sequence[Part], folders: Mapping[str, str]) -> list[Subject]:
        [part] = parts
        return [Subject(part, SFTTask(config).role(folders[part.role]), sft_loss, "tokens", reference.Loss())]

    def rows(
        self, config: SFTConfig, subject: Subject, model: CheckedModel, *, sequences: int, length: int, device: str
    ) -> Rows:
        rows = first_rows(
            config.data, subject.config.model, of_batch=config.train.global_batch_size, seed=config.seed,
            sequences=sequences, length=length,
        )  # fmt: skip
        if config.teacher is None:
            return rows
        return dataclasses.replace(rows, words=f"{rows.words}; the loss is that of labels alone, without the teacher")


CHECKED = CheckedSFT()
