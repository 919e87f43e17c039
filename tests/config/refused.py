"""Configs made of plain data and overrides, a base of each command, and those that are refused with one line."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import pytest

from mrl.config.load import apply_override, from_dict
from mrl.errors import ConfigError
from tests.bad_input.mistakes import CONFIG, DPO_CONFIG, PPO_CONFIG, RM_CONFIG, SERVE_CONFIG

C = TypeVar("C")

FILES = {"sft": "config.yaml", "ppo": "ppo.yaml", "dpo": "dpo.yaml", "rm": "rm.yaml", "serve": "serve.yaml"}
BASES = {"sft": CONFIG, "ppo": PPO_CONFIG, "dpo": DPO_CONFIG, "rm": RM_CONFIG, "serve": SERVE_CONFIG}


def nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as the sections of a config."""
    config: dict[str, Any] = {}
    for dotted_name, value in keys.items():
        *sections, name = dotted_name.split(".")
        section = config
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    return config


def dotted(config: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """The way back: dotted keys and their values, those of empty mappings among them."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        here = f"{path}.{name}" if path else name
        found |= dotted(value, here) if isinstance(value, dict) and value else {here: value}
    return found


def config_of(root: type[C], base: Mapping[str, Any], *overrides: str) -> C:
    """Returns the checked config of `base` with overrides (KEY=VALUE) over it."""
    raw = copy.deepcopy(dict(base))
    for override in overrides:
        apply_override(raw, override)
    return from_dict(raw, root)


def assert_refused(root: type, base: Mapping[str, Any], overrides: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(root, base, *overrides)
    first = caught.value.line  # that of the next ones, where a section lacks keys too, is below it
    assert says in first and str(caught.value).split("\n") == [first, *(one.line for one in caught.value.others)]


def put(plain: dict[str, Any], path: str, value: Any) -> None:
    """Writes a key into plain data; sections on the way are made."""
    *parents, name = path.split(".")
    for parent in parents:
        if not isinstance(plain.get(parent), dict):
            plain[parent] = {}
        plain = plain[parent]
    plain[name] = value
