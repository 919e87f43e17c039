"""The common keys of `mrl dpo` and `mrl rm`: rows of whole answers, and losses of pairs."""

from __future__ import annotations

import abc
import dataclasses
from typing import Literal

from mrl.config.schema import (
    MAX_SEQUENCES,
    REQUIRED,
    CheckpointConfig,
    EngineConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    key,
)
from mrl.config.sources import PROMPT_END_HELP, StreamedRowsConfig


class AnswerLossConfig(abc.ABC):
    """The section `loss`."""

    name: str

    @property
    @abc.abstractmethod
    def is_paired(self) -> bool:
        """Whether it is a loss of pairs, both answers of which one micro-batch holds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerRowsConfig(StreamedRowsConfig):
    max_length: int = key(2048, "longest sequence in tokens, prompt and answer", minimum=2, long_rows=True)
    truncation: Literal["error", "drop"] = key(
        "error",
        "a row with a longer sequence stops the run, or is skipped, counted and reported (drop). None is cut, "
        "because an answer would lose its end, or a pair its shared prompt",
        long_rows=True,
    )
    prompt_end: str | None = key(None, PROMPT_END_HELP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswersTrainConfig(TrainConfig):
    global_batch_size: int = key(
        REQUIRED,
        "rows per optimizer step over all ranks, a pair as one",
        minimum=1,
        maximum=MAX_SEQUENCES,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswersConfig:
    """A run on answers; each command has `model`, `loss` and `data` of its own."""

    output_dir: str = key(REQUIRED, "the run's directory", may_change=True)
    seed: int = key(0, "seed of initialisation, dropout and data order", minimum=0, maximum=2**32 - 1)
    model: ModelConfig = key(REQUIRED, "the model")
    engine: EngineConfig = key(EngineConfig, "the engine and its layout")
    optimizer: OptimizerConfig = key(OptimizerConfig, "the optimizer and its schedule")
    loss: AnswerLossConfig = key(REQUIRED, "the loss")
    data: AnswerRowsConfig = key(REQUIRED, "the data")
    train: AnswersTrainConfig = key(REQUIRED, "length of the run")
    checkpoint: CheckpointConfig = key(CheckpointConfig, "saving and resuming", may_change=True)
    log: LogConfig = key(LogConfig, "where metrics go", may_change=True)

    @property
    def group(self) -> int:
        """Sequences that one micro-batch holds together."""
        return 2 if self.loss.is_paired else 1

    @property
    def longest_group(self) -> tuple[int, str]:
        """Returns the most tokens that a micro-batch has to hold, and their key in words."""
        longest = self.data.max_length
        if self.group == 1:
            return longest, f"data.max_length {longest}"
        return 2 * longest, f"a pair of sequences of data.max_length {longest}"
