"""Finds the engine of a role: one of ours, or one that an installed package registers under `mrl.engines`."""

from __future__ import annotations

import importlib

from mrl.config import backends
from mrl.config.schema import RoleConfig
from mrl.engine.base import BaseEngine
from mrl.engine.checks import EngineChecks

ENGINES = {
    "megatron": ("mrl.engine.megatron", "Megatron"),
    "fsdp": ("mrl.engine.fsdp", "FSDP"),
}
"""Backend -> its package with the modules `engine` and `checks`, and the beginning of their classes' names."""


def build_engine(config: RoleConfig) -> BaseEngine:
    """Returns the engine of `config.engine.backend`, joined to the other ranks; `init_model` comes next."""
    return engine_class(config.engine.backend)(config)


def engine_class(name: str) -> type[BaseEngine]:
    """Returns the class of the backend `name`, imported.

    Raises ConfigError if no package registers the name or several do.
    """
    if name not in ENGINES:
        return backends.entry_point(name).load()
    package, prefix = ENGINES[name]
    return getattr(importlib.import_module(f"{package}.engine"), f"{prefix}Engine")


def checks_of(name: str) -> type[EngineChecks]:
    """Returns the checks of a config for the backend `name`, without importing what runs one of mrl's own engines."""
    if name not in ENGINES:
        return engine_class(name)
    package, prefix = ENGINES[name]
    return getattr(importlib.import_module(f"{package}.checks"), f"{prefix}Checks")
