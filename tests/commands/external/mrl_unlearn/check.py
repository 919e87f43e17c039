"""How `mrl check` runs the step of `mrl unlearn`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mrl.check import reference
from mrl.check.command import CommandCheck, Subject
from mrl.check.folder import CheckedModel
from mrl.check.rows import Rows, first_rows
from mrl.config.command import Part
from mrl_unlearn.loss import UnlearnLoss
from mrl_unlearn.record import UnlearnConfig
from mrl_unlearn.trainer import role_config


class CheckedUnlearn(CommandCheck[UnlearnConfig]):
    def subjects(self, config: UnlearnConfig, parts: Sequence[Part], folders: Mapping[str, str]) -> list[Subject]:
        floor = config.forget.floor
        loss = reference.Loss(lambda log_probs_T, labels_T, fields: (log_probs_T - floor).clamp(min=0))
        return [Subject(parts[0], role_config(config, folders[""]), UnlearnLoss(floor), "tokens", loss)]

    def rows(
        self, config: UnlearnConfig, subject: Subject, model: CheckedModel, *, sequences: int, length: int, device: str
    ) -> Rows:
        of_batch = config.train.global_batch_size
        model_config = subject.config.model
        return first_rows(
            config.data, model_config, of_batch=of_batch, seed=config.seed, sequences=sequences, length=length
        )


CHECKED = CheckedUnlearn()
