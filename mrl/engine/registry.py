"""Finds the engine of a role: one of ours, or one that an installed package registers under `mrl.engines`."""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any

from mrl.config import backends
from mrl.config.schema import RoleConfig
from mrl.engine.base import BaseEngine
from mrl.engine.checks import EngineChecks
from mrl.errors import ConfigError

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

    Raises ConfigError if no engine or more than one has the name, or if the class is no engine.
    """
    taken = backends.registered_engines().get(name, [])
    if name not in ENGINES:
        return _load(backends.entry_point(name))
    if taken:
        raise ConfigError(
            "engine.backend",
            name,
            f"is an engine of mrl, and {backends.package_of(taken[0])} registers it, too",
            "uninstall that package",
        )
    package, prefix = ENGINES[name]
    return getattr(importlib.import_module(f"{package}.engine"), f"{prefix}Engine")


def checks_of(name: str) -> type[EngineChecks]:
    """Returns the checks of a config for the backend `name`, without importing what runs one of mrl's own engines."""
    if name not in ENGINES:
        return engine_class(name)
    package, prefix = ENGINES[name]
    return getattr(importlib.import_module(f"{package}.checks"), f"{prefix}Checks")


def _load(entry: metadata.EntryPoint) -> type[BaseEngine]:

    def refusal(why: str, fix: str) -> ConfigError:
        of = f"is {entry.value} of the package {backends.package_of(entry)}"
        return ConfigError("engine.backend", entry.name, f"{of}, {why}", fix)

    try:
        loaded_class: Any = entry.load()
    except Exception as error:  # the package's own code may raise anything
        raise refusal(f"which cannot be imported ({type(error).__name__}: {error})", "mend or reinstall it") from error
    if not (isinstance(loaded_class, type) and issubclass(loaded_class, BaseEngine)):
        raise refusal("which is no subclass of mrl.engine.base.BaseEngine", "register one (docs/backends.md)")
    if loaded_class.__abstractmethods__:
        raise refusal(f"which lacks the methods {', '.join(sorted(loaded_class.__abstractmethods__))}", "add them")
    if vars(loaded_class).get("backend") != entry.name:
        raise refusal(f"whose `backend` is {getattr(loaded_class, 'backend', None)!r}", "give both the same name")
    return loaded_class
