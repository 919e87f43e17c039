"""YAML and dotted overrides to a frozen, checked config, and back.

A config is an instance of its command's `root`, and the command's record checks it. Every mistake is a `ConfigError` of
one line: `dotted.key: value VALUE is ...; what would work`.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from mrl.config import yaml_text
from mrl.config.build import build_section
from mrl.config.command import check_recognised, command_of
from mrl.config.keys import join_key, value_at, value_kind
from mrl.config.schema import SFTConfig
from mrl.errors import ConfigError, MistakeCollector

Root = TypeVar("Root")
_SFT_ROOT: Any = SFTConfig  # a default that a type variable cannot have


def load_config(path: str | pathlib.Path, overrides: Sequence[str] = (), root: type[Root] = _SFT_ROOT) -> Root:
    """Returns the config in the YAML file `path` with `overrides` (`dotted.key=VALUE`, VALUE in YAML) over it,
    checked."""
    raw = read_yaml(path)
    check_recognised(raw, path, root)
    with MistakeCollector() as mistakes:
        for override in overrides:
            with mistakes.noted():
                apply_override(raw, override)
    return from_dict(raw, root)


def read_yaml(path: str | pathlib.Path) -> dict[str, Any]:
    """Returns the mapping in a YAML file, not checked against the schema."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(yaml_text.MAX_LENGTH + 1)  # it may be a file of rows by mistake
    except FileNotFoundError:
        raise ConfigError(path, why="the config file does not exist", fix="give the path of a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(path, why=f"the config file cannot be read: {reason}", fix="give a YAML file") from None
    raw = yaml_text.parse(text, str(path))
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        why = f"the config file holds {value_kind(raw)}"
        raise ConfigError(path, why=why, fix="give a mapping such as `output_dir: runs/demo`")
    return raw


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Puts `dotted.key=VALUE` into `raw`, in place; sections on the way are made."""
    dotted, equals, text = override.partition("=")
    names = dotted.split(".")
    if not equals or not all(names):
        raise ConfigError(override, why="is not an override", fix="write KEY=VALUE, as in train.steps=10")
    if not text.strip():
        fix = f"write {dotted}=null for none, or '{dotted}=\"\"' for an empty text"
        raise ConfigError(dotted, why="the override has no value", fix=fix)
    value = yaml_text.parse(text, "", dotted)
    node = raw
    for depth, name in enumerate(names[:-1], start=1):
        if node.get(name) is None:
            node[name] = {}
        if not isinstance(node[name], dict):
            section = ".".join(names[:depth])
            raise ConfigError(section, node[name], f"is {value_kind(node[name])}", f"{dotted} needs a mapping here")
        node = node[name]
    node[names[-1]] = value


def from_dict(raw: Mapping[str, Any], root: type[Root] = _SFT_ROOT) -> Root:
    """Returns a checked config from plain data, as YAML gives it."""
    command = command_of(root)
    config = build_section(root, fill_rates(raw, command.name), "", root)
    command.check(config)
    return config


def to_dict(config: Any) -> dict[str, Any]:
    """Returns plain data of a config with every key resolved, defaults included. Tuples become lists."""

    def plain(items: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in items}

    return dataclasses.asdict(config, dict_factory=plain)


def dump_config(config: Any) -> str:
    """Returns YAML of the resolved config; loading it gives an equal config."""
    return yaml_text.dump(to_dict(config))


# Adapters take ten times the rate of all weights: Schulman 2025, "LoRA Without Regret" (Thinking Machines Lab).
_TEN = "ten times that of all weights, as Schulman 2025 (LoRA Without Regret)"
_SFT = "Ouyang 2022, appendix C.1, rounded"
_DPO = "TRL 1.16.0, DPOConfig"
_GRPO = "TRL 1.16.0, GRPOConfig, and verl 0.9.1, actor.optim"
_CRITIC = "verl 0.9.1, critic.optim"
RATES: Mapping[tuple[str, str, bool], tuple[float, str]] = {
    ("sft", "", False): (1e-5, _SFT),
    ("sft", "", True): (1e-4, _TEN),
    ("dpo", "", False): (1e-6, _DPO),
    ("dpo", "", True): (1e-5, _TEN),
    ("rm", "", False): (1e-5, "as mrl sft"),
    ("rm", "", True): (1e-4, "as mrl sft; TRL 1.16.0, RewardConfig"),
    ("ppo", "actor", False): (1e-6, _GRPO),
    ("ppo", "actor", True): (1e-5, _TEN),
    ("ppo", "critic", False): (1e-5, _CRITIC),
    ("ppo", "critic", True): (1e-4, _TEN),
}
"""(command, role, whether adapters train) -> the peak learning rate, and where it is from."""


def fill_rates(raw: Mapping[str, Any], command: str) -> dict[str, Any]:
    """Returns the config as plain data with a rate for each optimizer that has none.

    The rate is that of the resumed run, else the table's.
    """
    made = dict(raw)
    for role in (role for of, role, adapters in RATES if of == command and not adapters):
        sections = [role, "optimizer"] if role else ["optimizer"]
        if value_at(raw, join_key(role, "optimizer.lr")) is not None or not _may_hold(raw, role):
            continue
        is_used = role != "critic" or "critic" in raw  # that of an algorithm without one is another run's
        saved = value_at(_saved(raw), join_key(role, "optimizer.lr")) if is_used else None
        own, _ = RATES[command, role, value_at(raw, join_key(role, "model.lora")) is not None]
        node = made
        for name in sections:
            node[name] = dict(node.get(name) or {})
            node = node[name]
        node["lr"] = own if saved is None else saved
    return made


def _may_hold(raw: Any, role: str) -> bool:
    """Returns whether each section is a mapping or absent: what is anything else has a message of its own."""
    return all(isinstance(value_at(raw, path), Mapping | None) for path in (role, join_key(role, "optimizer")))


def _saved(raw: Mapping[str, Any]) -> Any:
    """Returns the config of the resumed run, as it was written; None if there is none to read."""
    from mrl.config.yaml_text import parse  # PyYAML, which a help does not need

    resume, output_dir = value_at(raw, "checkpoint.resume"), raw.get("output_dir")
    folders = [output_dir] if isinstance(output_dir, str) and output_dir else []
    if isinstance(resume, str) and resume not in ("auto", "never"):
        folders += [resume, os.path.dirname(resume), os.path.dirname(os.path.dirname(resume))]
    for folder in folders if resume != "never" else ():
        try:
            with open(os.path.join(folder, "config.yaml"), encoding="utf-8") as file:
                return parse(file.read(), folder)
        except (OSError, ValueError, ConfigError):  # the run has more words for it
            continue
    return None
