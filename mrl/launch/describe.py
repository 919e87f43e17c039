"""The output of `--dry-run`: the resolved config, and its meaning on these processes by its command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mrl.config.checks import micro_batch_tokens
from mrl.config.command import Config, Part, TrainingCommand
from mrl.config.load import dump_config
from mrl.config.schema import DivergenceConfig, EngineConfig, TrainConfig
from mrl.launch.preflight import position_notes
from mrl.parallel import ParallelDims
from mrl.words import pluralize


def describe(
    command: TrainingCommand, config: Config, parts: Sequence[Part], layouts: Sequence[ParallelDims]
) -> Iterator[str]:
    """Yields lines of YAML, with comments at the end."""
    yield from dump_config(config).splitlines()
    notes = (*_notes(parts, layouts), *position_notes(command, config, parts))
    for line in (*notes, *command.describe(config, parts, layouts)):
        yield f"# {line}"


def _notes(parts: Sequence[Part], layouts: Sequence[ParallelDims]) -> Iterator[str]:
    """Yields what each part's engine says of its choices."""
    from mrl.engine.registry import checks_of

    for part, dims in zip(parts, layouts, strict=True):
        for note in checks_of(part.engine.backend).notes_on(part.model, part.used_engine, dims, part.hf):
            yield part.key(note)


def length(train: TrainConfig) -> str:
    """Returns the length of a run in words: steps, or passes over the data."""
    return f"{train.steps} steps" if train.resolved_epochs is None else pluralize(train.resolved_epochs, "epoch")


def divergence(keys: DivergenceConfig) -> tuple[str, str]:
    """Returns the divergence from a teacher, and the token ids at which it is measured, in words."""
    kind = f"jsd (beta {keys.resolved_beta:g})" if keys.loss == "jsd" else keys.loss
    ids = "the whole vocabulary" if keys.top_k is None else f"its {keys.top_k} likeliest tokens and the rest"
    return kind, ids


def processes(dims: ParallelDims) -> str:
    """Returns how many processes a layout is on, in words."""
    return pluralize(dims.world_size, "process", "processes")


def micro_batch(engine: EngineConfig, max_length: int) -> str:
    """Returns what a micro-batch holds, in words."""
    tokens = micro_batch_tokens(engine.micro_batch, max_length)
    if engine.micro_batch.tokens == "auto":
        return f"auto: up to {tokens} tokens on CPUs"
    return f"{engine.micro_batch.size} sequences" if tokens is None else f"up to {tokens} tokens"
