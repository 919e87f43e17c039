"""How `mrl check` runs the step of `mrl sft`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from mrl.algorithms.sft import sft_loss
from mrl.check import reference
from mrl.check.command import Checked, TwoSteps
from mrl.check.folder import CheckedModel
from mrl.check.rows import Rows, first_rows
from mrl.check.subject import Subject
from mrl.config.command import Part
from mrl.config.schema import SFTConfig
from mrl.trainers import sft


class CheckedSFT(Checked[SFTConfig]):
    resumes_without = "a teacher, evaluation, guards and the batch size"

    def subjects(self, config: SFTConfig, parts: Sequence[Part], folders: Mapping[str, str]) -> list[Subject]:
        [part] = parts
        return [Subject(part, sft.role_config(config, folders[part.role]), sft_loss, "tokens", reference.Loss())]

    def rows(
        self, config: SFTConfig, subject: Subject, model: CheckedModel, *, sequences: int, length: int, device: str
    ) -> Rows:
        found = first_rows(
            config.data, subject.config.model, of_batch=config.train.global_batch_size, seed=config.seed,
            sequences=sequences, length=length,
        )  # fmt: skip
        if config.teacher is None:
            return found
        return dataclasses.replace(found, words=f"{found.words}; the loss is that of labels alone, without the teacher")

    def two_steps(self, config: SFTConfig, small: TwoSteps) -> SFTConfig:
        """Returns a config on the rows of the check, in tokens."""
        batch = max(small.processes, len(small.rows.examples) // 2)
        return dataclasses.replace(
            config,
            model=small.model(config.model, ""),
            engine=small.engine(config.engine, ""),
            optimizer=small.optimizer(config.optimizer),
            teacher=None,
            data=small.rows.as_data(config.data, small.place),
            train=dataclasses.replace(
                config.train, steps=2, epochs=None, eval_every=None, eval_batches=None, guards=False,
                global_batch_size=batch,
            ),
        )  # fmt: skip


CHECKED = CheckedSFT()
