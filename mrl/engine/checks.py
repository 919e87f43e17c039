"""Checks a config for an engine before any process starts, without importing what runs it.

`BaseEngine` is an `EngineChecks`.
"""

from __future__ import annotations

import dataclasses

from mrl.config.backends import check_supported
from mrl.config.schema import EngineConfig, ModelConfig
from mrl.errors import ModelError
from mrl.parallel import ParallelDims
from mrl.weights.table import HFConfig


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Describes the sequences that a run gives a model."""

    longest: int  # tokens
    key: str  # the key that sets it, or several with their values
    packed: bool  # end to end, without padding
    generated: bool  # the model samples them, token by token


class EngineChecks:
    """Checks a config for one engine."""

    backend: str
    """The name of the engine in a config."""
    supports: tuple[str, ...] = ()
    """Keys, sections and choices that `check_config` lets pass (`check_supported`)."""

    @classmethod
    def check_config(cls, model: ModelConfig, engine: EngineConfig) -> None:
        """Raises ConfigError if a config asks for something that this engine does not do.

        This one refuses every key with another value than its default, except those in `supports` and those of all
        engines. An engine that checks values too overrides it and calls it.
        """
        check_supported(cls.backend, cls.supports, model, engine)

    @classmethod
    def check_model(cls, engine: EngineConfig, dims: ParallelDims, hf_config: HFConfig, sequences: Sequences) -> None:
        """Raises ConfigError or ModelError if this engine cannot run a model so. hf_config: the content of its
        config.json.

        dims: the layout on the processes of the run. This one refuses nothing.
        """

    @classmethod
    def notes_on(cls, model: ModelConfig, engine: EngineConfig, dims: ParallelDims, hf_config: HFConfig) -> list[str]:
        """Returns lines for the user on what the engine chooses if the config leaves it open, each beginning with a
        key.

        Raises ConfigError if no machine can have a choice of the config. `--dry-run` prints the lines, and the run may
        be for another machine. This one chooses nothing.
        """
        return []

    @classmethod
    def check_anywhere(cls, model: ModelConfig, engine: EngineConfig, dims: ParallelDims, hf_config: HFConfig) -> None:
        """Raises ConfigError if no machine can do what the config asks for. This one refuses nothing.

        It is called instead of `check_here` if the run is for another machine.
        """

    @classmethod
    def check_here(cls, model: ModelConfig, engine: EngineConfig, dims: ParallelDims, hf_config: HFConfig) -> None:
        """Raises ConfigError if this machine lacks something that the config needs, before processes are started.

        This one refuses what `notes_on` refuses.
        """
        cls.notes_on(model, engine, dims, hf_config)


def whole_number(model: HFConfig, name: str) -> int:
    """Returns the count under `name` in config.json. model: its content."""
    value = model.get(name)
    if type(value) is not int or value < 1:
        raise ModelError(
            "config.json",
            why=f"{name}: value {value!r} is not a whole number of at least 1",
            fix="give the model's own",
        )
    return value
