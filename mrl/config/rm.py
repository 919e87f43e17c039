"""The keys of `mrl rm`: those of `mrl sft`, rows that say how good answers are, and a loss on the scores of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from mrl.config.schema import (
    REQUIRED,
    CheckpointConfig,
    EngineConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    RowsConfig,
    TrainConfig,
    key,
)
from mrl.config.sources import FORMS

FORMAT_OF: Mapping[str, str] = {"bradley_terry": "preference", "regression": "graded", "steps": "steps"}
"""`loss.name` -> the form of row that it is of, a `data.format`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreLossConfig:
    name: Literal["bradley_terry", "regression", "steps"] = key(
        REQUIRED,
        "the loss (docs/rm.md): bradley_terry on pairs of answers, regression on graded answers, steps on answers of "
        "which every step has a label",
    )
    centering: float | None = key(
        None,
        "of bradley_terry: weight of the squared sum of a pair's scores, which keeps scores around 0; null is 0",
        minimum=0,
        maximum=1000,
    )

    @property
    def is_paired(self) -> bool:
        """Whether it is a loss of pairs, both answers of which one micro-batch holds."""
        return self.name == "bradley_terry"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredDataConfig(RowsConfig):
    train: str = key(REQUIRED, f"training rows: {FORMS}", moves=True)
    eval: str | None = key(None, "evaluation rows, in the same forms", may_change=True)
    format: Literal["auto", "preference", "graded", "steps"] = key(
        "auto",
        "form of a row: preference (prompt, chosen, rejected; or chosen and rejected as whole conversations), graded "
        "(prompt, completion, score) or steps (prompt, completions, labels); auto detects it by the first row's fields",
    )
    step_separator: str = key("\n", "of format steps: what joins the steps of an answer, and ends each but the last")
    max_length: int = key(2048, "longest sequence in tokens, prompt and answer", minimum=2)
    truncation: Literal["error", "drop"] = key(
        "error",
        "what happens to a row with a longer sequence: stop, or leave the row out, counted and reported; none is cut, "
        "as an answer is scored at its end",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RMConfig:
    output_dir: str = key(REQUIRED, "the run's directory", may_change=True)
    seed: int = key(0, "seed of initialisation, dropout and data order", minimum=0, maximum=2**32 - 1)
    model: ModelConfig = key(
        REQUIRED, "what the reward model starts from: a language model, or a sequence classifier of one label"
    )
    engine: EngineConfig = key(EngineConfig, "the engine and its layout")
    optimizer: OptimizerConfig = key(OptimizerConfig, "AdamW and its schedule")
    loss: ScoreLossConfig = key(REQUIRED, "the loss on scores")
    data: ScoredDataConfig = key(REQUIRED, "the data")
    train: TrainConfig = key(REQUIRED, "length of the run; its batches count rows")
    checkpoint: CheckpointConfig = key(CheckpointConfig, "saving and resuming", may_change=True)
    log: LogConfig = key(LogConfig, "where metrics go", may_change=True)

    @property
    def group(self) -> int:
        """Sequences that one micro-batch holds together, those of a row."""
        return 2 if self.loss.is_paired else 1

    @property
    def longest_group(self) -> tuple[int, str]:
        """Most tokens that one micro-batch has to hold, and the key that sets it in words."""
        longest = self.data.max_length
        if self.group == 1:
            return longest, f"data.max_length {longest}"
        return 2 * longest, f"a pair of sequences of data.max_length {longest}"
