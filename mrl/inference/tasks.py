"""The forms of TASK: a YAML file with rows, a reward and the sampling, or the rows themselves."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mrl.config import yaml_text
from mrl.config.build import build_section
from mrl.config.inference import EvalConfig
from mrl.config.keys import value_kind
from mrl.config.load import read_yaml
from mrl.config.rewards import NAMED
from mrl.config.schema import key
from mrl.errors import ConfigError, DataError


def _rows(raw: Any, path: str) -> dict[str, Any]:
    """Returns keys of `data`. The rows alone may be given."""
    if isinstance(raw, str):
        return {"eval": raw}
    if isinstance(raw, Mapping) and "train" in raw:
        raise ConfigError(f"{path}.train", raw["train"], "has no effect in a task", "name its rows in data.eval")
    if isinstance(raw, Mapping) and isinstance(raw.get("eval"), str):
        return dict(raw)
    raise ConfigError(path, raw, f"is {value_kind(raw)}", "give a file of rows, or {eval: FILE} and other keys of data")


def parse_reward(raw: Any, path: str) -> dict[str, Any]:
    """Returns an entry of rewards.functions. The name alone may be given."""
    if isinstance(raw, Mapping):
        return dict(raw)
    if not isinstance(raw, str) or not raw:
        why = "is empty" if raw == "" else f"is {value_kind(raw)}"
        raise ConfigError(path, raw, why, f"give {', '.join(NAMED)}, or path.py:name")
    if raw.startswith("{"):
        return parse_reward(yaml_text.parse(raw, path, path), path)
    return {"function": raw} if ":" in raw or raw.endswith(".py") else {"name": raw}


def _optional_reward(raw: Any, path: str) -> dict[str, Any] | None:
    return None if raw is None else parse_reward(raw, path)


def _rewards(raw: Any, path: str) -> dict[str, Any] | None:
    """Returns the section `rewards`. The list of functions alone may be given."""
    if raw is None:
        return None
    entries = raw.get("functions") if isinstance(raw, Mapping) else raw
    if not isinstance(entries, list) or not entries:
        raise ConfigError(path, raw, "names no reward", "give a list of them, as [gsm8k]")
    functions = [parse_reward(entry, f"{path}[{i}]") for i, entry in enumerate(entries)]
    return {**(raw if isinstance(raw, Mapping) else {}), "functions": functions}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """The keys of a task file."""

    name: str | None = key(None, "what the task is called; null is the name of the file")
    data: Any = key(None, "rows with prompts and answers, or a mapping of keys of data", parse=_rows)
    reward: Any = key(None, "what scores a completion: a name, path.py:name, or a mapping", parse=_optional_reward)
    rewards: Any = key(None, "several of them, or the section of `mrl ppo`", parse=_rewards)
    samples: int | None = key(None, "completions of each prompt; 1 is greedy", minimum=1)
    max_new_tokens: int | None = key(None, "most tokens of a completion", minimum=1)
    temperature: float | None = key(None, "divides the logits; 0 is greedy", minimum=0, maximum=100)
    top_k: int | None = key(None, "as rollout.top_k", minimum=0)
    top_p: float | None = key(None, "as rollout.top_p", above=0, maximum=1)
    min_p: float | None = key(None, "as rollout.min_p", minimum=0, maximum=1)
    stop: tuple[str, ...] | None = key(None, "texts that end a completion")
    system: str | None = key(None, "a system message before every prompt")
    limit: int | None = key(None, "prompts, the first N; null for all", minimum=1)


IN_ROLLOUT = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "stop")


@dataclasses.dataclass(frozen=True)
class Task:
    """A task as keys of `mrl eval`, as plain data."""

    name: str
    raw: dict[str, Any]  # sections data, rollout and rewards
    limit: int | None


def read_task(path: str) -> Task:
    """Returns the task of a YAML file, or of rows, whose reward is given elsewhere. Raises a UserError."""
    if not path.endswith((".yaml", ".yml")):
        return Task(Path(path.rstrip("/")).name.partition(".")[0] or path, {"data": {"eval": path}}, None)
    config = build_section(TaskConfig, read_yaml(path), "", TaskConfig)
    if config.reward is not None and config.rewards is not None:
        raise ConfigError("reward", why="is given together with rewards", fix="keep one of them")
    rollout = {name: getattr(config, name) for name in IN_ROLLOUT if getattr(config, name) is not None}
    rollout |= {} if config.samples is None else {"samples_per_prompt": config.samples}
    rewards = config.rewards if config.reward is None else {"functions": [config.reward]}
    raw: dict[str, Any] = {
        "data": config.data,
        "rollout": {k: list(v) if k == "stop" else v for k, v in rollout.items()},
    }
    raw |= {} if rewards is None else {"rewards": rewards}
    if config.system is not None:
        raw["data"] = {"system": config.system, **raw["data"]}
    return Task(config.name or Path(path).stem, raw, config.limit)


def merged(task: Task, given: Mapping[str, Any], reward: str | None) -> dict[str, Any]:
    """Returns the keys of `mrl eval`: those of a task, overridden by the user's KEY=VALUE and options.

    reward: of --reward.
    """
    raw: dict[str, Any] = dict(task.raw)
    for section, value in given.items():
        raw[section] = {**raw.get(section, {}), **value} if isinstance(value, dict) else value
    if reward is not None and "functions" in given.get("rewards", {}):
        raise ConfigError("rewards.functions", why="is given by KEY=VALUE and by --reward", fix="keep one of them")
    if reward is not None:
        raw["rewards"] = {**raw.get("rewards", {}), "functions": [parse_reward(reward, "--reward")]}
    raw["data"] = {"train": raw["data"]["eval"], **raw["data"]}
    raw.setdefault("rollout", {})
    return raw


def first_row(path: str, split: str | None) -> list[tuple[dict[str, Any], str]]:
    """Returns the first row of a file with its file and line. [] where the run has words for what is there."""
    from mrl.data.rows import open_rows  # it imports datasets

    if not os.path.exists(os.path.expanduser(path)) and "://" not in path:
        return []  # a glob, a hub id, or nothing
    rows = open_rows(path, split=split, part="eval")
    try:
        return [(rows[0], rows.where(0))]
    except DataError:
        return []


def check_task_rewards(config: EvalConfig) -> None:
    """Raises ConfigError if the functions do not fit the first row, before a model is loaded."""
    from mrl.data.formats import rename_fields
    from mrl.rewards import functions

    data = config.data
    try:
        first = [(rename_fields(row, data.columns), where) for row, where in first_row(str(data.eval), data.split)]
    except DataError:
        return  # of a row that lacks a column, the run says it
    if config.rewards is not None:
        functions.check_rewards(config.rewards, first)
