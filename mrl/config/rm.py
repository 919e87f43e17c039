"""The keys of `mrl rm`: those of `mrl sft`, rows that say how good answers are, and a loss on the scores of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from mrl.config.answers import AnswerLossConfig, AnswerRowsConfig, AnswersConfig
from mrl.config.rows import EVAL_HELP, TRAIN_HELP
from mrl.config.schema import REQUIRED, ModelConfig, key
from mrl.config.sources import ScoredShare, ScoredSource, eval_of, train_of

FORMAT_OF: Mapping[str, str] = {"bradley_terry": "preference", "regression": "graded", "steps": "steps"}
"""`loss.name` -> the form of row that it is of, a `data.format`."""

CENTERING = 0.0
"""`loss.centering` where it is null."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreLossConfig(AnswerLossConfig):
    name: Literal["bradley_terry", "regression", "steps"] = key(
        REQUIRED,
        "the loss (docs/rm.md): bradley_terry on pairs of answers, regression on graded answers, steps on answers "
        "with a label for each step",
    )
    centering: float | None = key(
        None,
        "for bradley_terry: weight of the squared sum of a pair's scores, to keep scores around 0. null is 0",
        minimum=0,
        maximum=1000,
    )

    @property
    def resolved_centering(self) -> float:
        return CENTERING if self.centering is None else self.centering

    @property
    def is_paired(self) -> bool:
        return self.name == "bradley_terry"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredDataConfig(AnswerRowsConfig):
    train: str | tuple[ScoredShare, ...] = key(REQUIRED, TRAIN_HELP, moves=True, parse=train_of(ScoredShare))
    eval: str | Mapping[str, ScoredSource] | None = key(None, EVAL_HELP, may_change=True, parse=eval_of(ScoredSource))
    format: Literal["auto", "preference", "graded", "steps"] = key(
        "auto",
        "form of a row: preference (prompt, chosen, rejected; or chosen and rejected as whole conversations), graded "
        "(prompt, completion, score) or steps (prompt, completions, labels). auto detects it from the first row's "
        "fields",
    )
    step_separator: str = key(
        "\n", "with format steps: the text between the steps of an answer, which ends each step but the last"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RMConfig(AnswersConfig):
    model: ModelConfig = key(REQUIRED, "the starting model: a language model, or a sequence classifier with one label")
    loss: ScoreLossConfig = key(REQUIRED, "the loss on scores")
    data: ScoredDataConfig = key(REQUIRED, "the data")
