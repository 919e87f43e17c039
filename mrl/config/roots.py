"""The commands that take a config, and what the config of each is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrl.config.ppo import PPOConfig
from mrl.config.schema import SFTConfig

Config = SFTConfig | PPOConfig

ROOTS: Mapping[str, type] = {"sft": SFTConfig, "ppo": PPOConfig}
"""Command -> the type of its config."""


def command_of(config: Config) -> str:
    """The command that takes `config`."""
    return next(command for command, root in ROOTS.items() if type(config) is root)


def command_of_data(data: Mapping[str, Any]) -> str:
    """The command that takes the config which `data` is the plain data of."""
    return "ppo" if "actor" in data else "sft"
