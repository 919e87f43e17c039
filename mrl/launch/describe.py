"""What `--dry-run` prints: the resolved config, and what it means on these processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mrl.config.checks import micro_batch_tokens
from mrl.config.load import dump_config
from mrl.config.roots import Config

if TYPE_CHECKING:
    from mrl.config.ppo import PPOConfig
    from mrl.config.schema import EngineConfig, SFTConfig
    from mrl.launch.preflight import Part
    from mrl.parallel import ParallelDims


def describe(command: str, config: Config, parts: Sequence[Part], layouts: Sequence[ParallelDims]) -> Iterator[str]:
    """Lines of YAML, with comments at the end."""
    yield from dump_config(config).splitlines()
    for line in _of_sft(config, *layouts) if command == "sft" else _of_ppo(config, parts, layouts):
        yield f"# {line}"


def _of_sft(config: SFTConfig, dims: ParallelDims) -> list[str]:
    train = config.train
    length = f"{train.steps} steps" if train.steps is not None else f"{train.resolved_epochs:g} epochs"
    return [
        f"layout: {dims.describe()} on {_processes(dims)}",
        f"micro-batch: {_micro_batch(config.engine, config.data.max_length)}",
        f"length: {length} of {train.global_batch_size} sequences a step",
    ]


def _of_ppo(config: PPOConfig, parts: Sequence[Part], layouts: Sequence[ParallelDims]) -> list[str]:
    from mrl.algorithms.configured import configured_recipe  # they import torch, which a dry run of sft does not need
    from mrl.algorithms.recipes import in_words

    train, per_iteration = config.train, config.steps_per_iteration
    lines = [
        f"{part.role}: {part.engine.backend} {dims.describe()} on {_processes(dims)}, micro-batches of "
        f"{_micro_batch(part.engine, config.max_length)}"
        for part, dims in zip(parts, layouts, strict=True)
    ]
    lines.append(f"algorithm: {in_words(configured_recipe(config.algorithm))}")
    lines.append(
        f"iteration: {config.prompts_per_iteration} prompts x {config.rollout.samples_per_prompt} samples, trained on in "
        f"{per_iteration} steps of {config.mini_batch_size} sequences"
    )
    if train.steps is not None:
        length = f"{train.steps} steps, {train.steps // per_iteration} iterations"
    else:
        length = f"{1 if train.epochs is None else train.epochs:g} epochs of the prompts, in whole iterations"
    return [*lines, f"length: {length}"]


def _processes(dims: ParallelDims) -> str:
    return f"{dims.world_size} {'process' if dims.world_size == 1 else 'processes'}"


def _micro_batch(engine: EngineConfig, max_length: int) -> str:
    tokens = micro_batch_tokens(engine.micro_batch, max_length)
    return f"{engine.micro_batch.size} sequences" if tokens is None else f"up to {tokens} tokens"
