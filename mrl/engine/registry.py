"""Which engine runs a role."""

from __future__ import annotations

import importlib

from mrl.config.schema import RoleConfig
from mrl.engine.base import BaseEngine

ENGINES = {
    "megatron": ("mrl.engine.megatron.engine", "MegatronEngine"),
    "fsdp": ("mrl.engine.fsdp.engine", "FSDPEngine"),
}
"""Backend -> module and class; only the one that runs is imported."""


def build_engine(config: RoleConfig) -> BaseEngine:
    """The engine of `config.engine.backend`, joined to the other ranks; `init_model` comes next."""
    module, name = ENGINES[config.engine.backend]
    return getattr(importlib.import_module(module), name)(config)
