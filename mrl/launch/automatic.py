"""Replaces `auto` by numbers, once in the life of a run: on GPUs by the most that a plan says fits.

A run saves the numbers in config.yaml, and a resume takes them from there. Only sections that the config has get one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mrl.config.checks import micro_batch_tokens
from mrl.config.command import Config, TrainingCommand
from mrl.config.keys import join_key, value_at
from mrl.config.load import from_dict, read_yaml, to_dict
from mrl.config.ppo import DEFAULT_CACHE
from mrl.config.schema import MicroBatchConfig
from mrl.errors import UserError, first_line

if TYPE_CHECKING:
    from mrl.plan.planner import Plan

C = TypeVar("C", bound=Config)

TOKENS, CACHE = "engine.micro_batch.tokens", "rollout.cache_tokens"
MOST_TOKENS = 32768
MARGIN = 0.1
"""The share of a GPU's memory that stays free beside what a plan reserves: activations are planned to within 10 %."""


def auto_keys(config: Config) -> list[str]:
    """Returns the dotted keys that are `auto` and get a number."""

    def walk(data: Mapping[str, Any], path: str) -> list[str]:
        found = []
        for name, value in data.items():
            key = join_key(path, name)
            if isinstance(value, Mapping):
                found += walk(value, key)
            elif value == "auto" and (key == CACHE or f".{key}".endswith(f".{TOKENS}")):
                found.append(key)
        return found

    return walk(to_dict(config), "")


def replaced(config: C, numbers: Mapping[str, int]) -> C:
    """Returns the config with numbers at some keys, checked. Roles that inherit a section still do."""
    if not numbers:
        return config
    data = to_dict(config)
    for key, number in numbers.items():
        section, _, name = key.rpartition(".")
        value_at(data, section)[name] = number
    return from_dict(data, type(config))


def with_saved(config: C) -> tuple[C, list[str]]:
    """Returns the config with numbers of the run that this one resumes, and a line for each.

    They are in the config.yaml of output_dir, or else of the folder `checkpoint.resume` or of one around it.
    """
    keys, folders = auto_keys(config), [Path(config.output_dir)]
    resume = getattr(getattr(config, "checkpoint", None), "resume", "auto")
    if resume not in ("auto", "never") and "://" not in resume:
        folders += [Path(resume), *Path(resume).absolute().parents[:2]]
    file = next((folder / "config.yaml" for folder in folders if (folder / "config.yaml").is_file()), None)
    before = {} if file is None or not keys else read_yaml(file)
    numbers = {key: number for key in keys if type(number := value_at(before, key)) is int}
    return replaced(config, numbers), [f"{key}: auto is {n:,}, as in {file}" for key, n in numbers.items()]


def with_defaults(
    command: TrainingCommand, config: C, why: str, keys: Sequence[str] | None = None
) -> tuple[C, list[str]]:
    """Returns the config with the default at each key, and a line for each. keys: None for all."""
    cache = max(DEFAULT_CACHE, command.longest(config)[0])
    tokens = micro_batch_tokens(MicroBatchConfig(), command.longest_group(config))
    assert tokens is not None
    numbers = {key: cache if key == CACHE else tokens for key in (auto_keys(config) if keys is None else keys)}
    lines = [f"{key}: auto is the default, {number:,}, because {why}" for key, number in numbers.items()]
    return replaced(config, numbers), lines


def with_planned(command: TrainingCommand, config: C, plan: Callable[[C], Plan]) -> tuple[C, list[str]]:
    """Returns the config with the most that fits at each key, and a line for each.

    plan: of a config, on GPUs less `MARGIN`. Its faults stop no run, which takes the default then.
    """
    lines = []
    for key in auto_keys(config):
        try:
            number, why = _most(command, config, key, plan)
            config, says = replaced(config, {key: number}), [f"{key}: auto is {number:,}, {why}"]
        except Exception as error:
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            config, says = with_defaults(command, config, kind + first_line(error), [key])
        lines += says
    return config, lines


def _most(command: TrainingCommand, config: C, key: str, plan: Callable[[C], Plan]) -> tuple[int, str]:
    """Returns the most that fits at a key, a multiple of the longest sequence, and why no more.

    Only the phases that the key changes have to fit: those of the roles with its section, or sampling.
    """
    if command.on_rows(config) is None:
        raise UserError(f"the batches of mrl {command.name} are its clients'")
    longest = command.longest(config)[0] if key == CACHE else command.longest_group(config)
    most, reason = max(MOST_TOKENS // longest, 1), "the most that auto takes"
    phases = [phase for phase in command.phases(config).phases if (phase.kind == "sample") == (key == CACHE)]
    if key == CACHE:
        layouts = [plan(config).roles[phase.role].dims for phase in phases]
        rows = [-(-phase.sequences // (dims.dp * dims.cp)) for phase, dims in zip(phases, layouts, strict=True)]
        most, reason = max(-(-DEFAULT_CACHE // longest), *rows), "enough for all sequences of a step"
    else:
        both = zip(command.parts(config), command.parts(replaced(config, {key: longest})), strict=True)
        roles = [part.role for part, changed in both if part.engine != changed.engine]
        phases = [phase for phase in phases if phase.role in roles]
    names = [phase.name for phase in phases]

    def fits(count: int) -> bool:
        made = plan(replaced(config, {key: count * longest}))
        uses = [use for use in made.uses if use.phase in names]
        if not uses or any(use.activations is None for use in uses):
            raise UserError("mrl plan does not know what it takes")
        return all(use.total <= made.room for use in uses)

    low, high = 0, most  # `low` sequences fit, and no more than `high`
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    if not low:
        raise UserError(f"by mrl plan not even {longest:,} fit")
    return low * longest, reason if low == most else f"the most that leaves {MARGIN:.0%} of a GPU free by mrl plan"
