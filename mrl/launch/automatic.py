"""Replaces `auto` by a number in the config of a run that starts on GPUs: once, by what `mrl plan` says fits.

    engine.micro_batch.tokens     multiples of the longest sequence, at most 32,768
    rollout.cache_tokens          65,536 times powers of two, at most what all sequences of a step take

A run writes its numbers into config.yaml, and one that resumes takes them from there. So micro-batches and bits stay.
Without a GPU, and where nothing is planned to fit, `auto` stays: engines read it as the default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl.config.command import Config, TrainingCommand
from mrl.config.load import load_config, read_yaml
from mrl.errors import ConfigError

if TYPE_CHECKING:
    from mrl.plan.gpus import GPU

MOST_TOKENS = 32768
MARGIN = 0.1
"""The part of a GPU's memory that stays free beside what a plan reserves, because a plan is not exact."""
TOKENS, CACHE = "engine.micro_batch.tokens", "rollout.cache_tokens"


def auto_keys(command: TrainingCommand, config: Config) -> list[str]:
    """Returns the keys that are `auto`, in the order in which they are chosen."""
    found = [part.key(TOKENS) for part in command.parts(config) if part.engine.micro_batch.tokens == "auto"]
    rollout = getattr(config, "rollout", None)
    if rollout is not None and rollout.cache_tokens == "auto":
        found.append(CACHE)
    return found


def kept(command: TrainingCommand, config: Config, overrides: Sequence[str]) -> list[str]:
    """Returns overrides, with those of `auto` that config.yaml of output_dir has as numbers."""
    file = Path(config.output_dir) / "config.yaml"
    keys = auto_keys(command, config)
    saved = read_yaml(file) if keys and file.exists() else {}
    values = {key: _at(saved, key) for key in keys}
    return [*overrides, *(f"{key}={value}" for key, value in values.items() if type(value) is int)]


def _at(data: Any, key: str) -> Any:
    for name in key.split("."):
        data = data.get(name) if isinstance(data, dict) else None
    return data


Fits = Callable[[Sequence[str]], bool | None]
"""`fits(overrides)`: whether the config with them is known to fit."""


def choose(
    command: TrainingCommand, config: Config, overrides: Sequence[str], fits: Fits
) -> tuple[list[str], list[str]]:  # fmt: skip
    """Returns (overrides, with a number for each `auto` that has one; lines for the user)."""
    longest, _ = command.longest(config)
    chosen, lines = list(overrides), []
    for key in auto_keys(command, config):
        if key == CACHE:
            most = max(
                (phase.sequences for phase in command.phases(config).phases if phase.kind == "sample"), default=0
            )
            values = [65536 * 2**n for n in range(max(most * longest // 65536, 0).bit_length() + 1)]
        else:
            values = list(range(longest, max(MOST_TOKENS, longest) + 1, longest))
        number = largest(values, lambda value: fits([*chosen, f"{key}={value}"]) is True)  # noqa: B023 - called here
        if number is None:
            lines.append(f"{key}: auto is the default, because no larger one is known to fit")
        else:
            chosen.append(f"{key}={number}")
            lines.append(f"{key}: auto is {number:,}, which leaves {MARGIN:.0%} of the GPU's memory free by mrl plan")
    return chosen, lines


def largest(values: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Returns the largest of ascending values that fits; None if the least does not."""
    low, high = 0, len(values)  # as many as `low` fit, and not as many as `high` + 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(values[middle - 1]) else (low, middle - 1)
    return values[low - 1] if low else None


def planned(
    command: TrainingCommand, path: str, overrides: Sequence[str], world_size: int, gpu: GPU
) -> tuple[list[str], list[str]]:
    """Does the work of `choose` by plans. This process plans from now on."""
    from mrl.launch import planning, preflight
    from mrl.plan import planner

    planner.prepare()
    known: Any = {}
    card = dataclasses.replace(gpu, memory=int(gpu.memory * (1 - MARGIN)))

    def fits(more: Sequence[str]) -> bool | None:
        try:
            config = load_config(path, more, command.root)
        except ConfigError:  # such as a micro-batch that is no multiple of what a key asks for
            return False
        with preflight.quiet():
            parts, layouts = planning.read_parts(command, config, world_size)
            return planner.plan(command, config, parts, layouts, card, known=known).known_to_fit

    config = load_config(path, overrides, command.root)
    return choose(command, config, overrides, fits)
