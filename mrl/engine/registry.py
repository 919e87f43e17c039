"""Which engine runs a role."""

from __future__ import annotations

import importlib

from mrl.config.schema import RoleConfig
from mrl.engine.base import BaseEngine
from mrl.errors import ConfigError

ENGINES = {
    "megatron": ("mrl.engine.megatron.engine", "MegatronEngine"),
    "fsdp": ("mrl.engine.fsdp.engine", "FSDPEngine"),
}
"""Backend -> module and class; only the one that runs is imported."""


def build_engine(config: RoleConfig) -> BaseEngine:
    """The engine of `config.engine.backend`, joined to the other ranks; `init_model` comes next."""
    module, name = ENGINES[config.engine.backend]
    engine = getattr(importlib.import_module(module), name)
    if config.model.lora is not None and not engine.trains_adapters:
        known = ", ".join(ENGINES)
        raise ConfigError(
            f"model.lora: is set, and the engine {config.engine.backend} trains no adapters; set engine.backend to one that does "
            f"(of {known}), or model.lora to null"
        )
    return engine(config)
