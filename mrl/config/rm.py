"""The keys of `mrl rm`: those of `mrl sft`, rows that say how good answers are, and a loss on the scores of a model.

And checks of them against each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from mrl.config.answers import AnswerLossConfig, AnswerRowsConfig, AnswersConfig
from mrl.config.checks import check_groups, check_prompt_end, check_stream, check_train, check_trained, formats_of
from mrl.config.schema import REQUIRED, ModelConfig, key
from mrl.config.sources import EVAL_HELP, TRAIN_HELP, ScoredShare, ScoredSource, eval_of, train_of
from mrl.errors import ConfigError

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


def check_rm(config: RMConfig) -> None:
    """Raises ConfigError where keys of `config` contradict each other or one would be left unread."""
    check_train(config.train, config.data)
    check_stream(config.data, config.train)
    check_prompt_end(config.data, FORMAT_OF[config.loss.name])
    _check_loss(config)
    check_groups(config, config.engine)
    check_trained(config)


def _check_loss(config: RMConfig) -> None:
    loss, data = config.loss, config.data
    if loss.centering is not None and not loss.is_paired:
        why = f"is not read by loss {loss.name}, whose labels say where scores lie"
        raise ConfigError("loss.centering", loss.centering, why, "leave it out; it is of bradley_terry")
    wanted = FORMAT_OF[loss.name]
    for given, format in formats_of(data).items():
        if format not in (None, "auto", wanted):
            name = next(name for name, of_loss in FORMAT_OF.items() if of_loss == format)
            why = f"is no form of row for loss.name {loss.name}"
            raise ConfigError(given, format, why, f"set loss.name to {name}, or {given} to {wanted}")
    if data.step_separator != "\n" and loss.name != "steps":
        why = f"is not used by loss.name {loss.name}, whose answers have no steps"
        raise ConfigError("data.step_separator", data.step_separator, why, "leave it out")
