"""What ranks run for tests/trainers/test_lora.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrl.config.load import from_dict
from mrl.config.ppo import PPOConfig
from mrl.engine.base import BaseEngine
from mrl.trainers.rl.trainer import trainer_of


def held(config: Mapping[str, Any]) -> dict[str, int]:
    """Elements of all parameters that each role's engine holds on this rank; a role without an engine is not there."""
    with trainer_of(from_dict(config, PPOConfig)) as trainer:
        trainer.dispatch.init_model()
        assert "reference" in trainer.folders, "the run has a reference"
        return {role: _elements(engine) for role, engine in trainer.dispatch.engines.items()}


def _elements(engine: BaseEngine) -> int:
    if engine.backend == "fsdp":
        return sum(parameter.to_local().numel() for parameter in engine.model.module.parameters())
    return sum(parameter.numel() for model in engine.model.chunks for parameter in model.parameters())
