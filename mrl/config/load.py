"""YAML and dotted overrides to a frozen, checked config, and back.

A config is an instance of its command's `root`, and the command's record checks it. Every mistake is a `ConfigError` of
one line: `dotted.key: value VALUE is ...; what would work`.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from mrl.config import yaml_text
from mrl.config.build import build_section
from mrl.config.command import check_recognised, command_of
from mrl.config.keys import value_kind
from mrl.config.rates import fill_rates
from mrl.config.schema import SFTConfig
from mrl.errors import ConfigError, MistakeCollector

Root = TypeVar("Root")
_SFT: Any = SFTConfig  # a default that a type variable cannot have


def load_config(path: str | pathlib.Path, overrides: Sequence[str] = (), root: type[Root] = _SFT) -> Root:
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


def from_dict(raw: Mapping[str, Any], root: type[Root] = _SFT) -> Root:
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
