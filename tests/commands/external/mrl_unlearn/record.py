"""The record of `mrl unlearn`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mrl.config.command import Part, TrainingCommand
from mrl.config.schema import (
    REQUIRED,
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    key,
)
from mrl.errors import ConfigError
from mrl.parallel import ParallelDims


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForgetConfig:
    floor: float = key(-8.0, "log-prob below which a token counts as forgotten", maximum=0)
    say_every: int = key(1, "say the loss every N steps", minimum=1, may_change=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnlearnConfig:
    output_dir: str = key(REQUIRED, "the run's directory", may_change=True)
    seed: int = key(0, "seed of initialisation, dropout and data order", minimum=0)
    model: ModelConfig = key(REQUIRED, "the model")
    engine: EngineConfig = key(EngineConfig, "the engine and its layout")
    optimizer: OptimizerConfig = key(OptimizerConfig, "AdamW and its schedule")
    forget: ForgetConfig = key(ForgetConfig, "how far the model forgets")
    data: DataConfig = key(REQUIRED, "the rows that it forgets")
    train: TrainConfig = key(REQUIRED, "length of the run")
    checkpoint: CheckpointConfig = key(CheckpointConfig, "saving and resuming", may_change=True)
    log: LogConfig = key(LogConfig, "where metrics go", may_change=True)


class Unlearn(TrainingCommand[UnlearnConfig]):
    name = "unlearn"
    help = """Make a model forget the rows that the YAML file CONFIG names."""
    examples = "mrl unlearn unlearn.yaml forget.floor=-5"
    root = UnlearnConfig
    trainer = "mrl_unlearn.trainer:run"
    checked = "mrl_unlearn.check:CHECKED"

    def check(self, config: UnlearnConfig) -> None:
        from mrl.config.checks import check_backend, check_optimizer

        check_backend(config.model, config.engine)
        check_optimizer(config.optimizer)
        if config.train.steps is None:
            raise ConfigError("train.steps", None, "gives no length, and mrl unlearn knows no epochs", "give a number")
        if config.forget.say_every > config.train.steps:
            every, steps = config.forget.say_every, config.train.steps
            raise ConfigError("forget.say_every", every, f"is above train.steps {steps}", f"give at most {steps}")

    def parts(self, config: UnlearnConfig) -> list[Part]:
        return [Part("", config.model, config.engine, optimizer=config.optimizer)]

    def longest(self, config: UnlearnConfig) -> tuple[int, str]:
        return config.data.max_length, "data.max_length"

    def describe(self, config: UnlearnConfig, parts: Sequence[Part], layouts: Sequence[ParallelDims]) -> list[str]:
        [dims] = layouts
        return [f"layout: {dims.describe()}", f"forgets in {config.train.steps} steps, down to {config.forget.floor:g}"]


COMMAND = Unlearn()
