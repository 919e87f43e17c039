"""A role is an engine with a job: what each is built from says everything about it.

actor: a policy that trains. critic: a value head that trains. reference: a policy without an optimizer. reward: a value head
without an optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping

from mrl.config.schema import RoleConfig
from mrl.engine.base import BaseEngine
from mrl.engine.registry import build_engine


def build_roles(role_configs: Mapping[str, RoleConfig]) -> dict[str, BaseEngine]:
    """The engine of each role, each in its own layout and of its own backend on the same ranks; `init_model` comes next."""
    return {role: build_engine(config) for role, config in role_configs.items()}
