"""What the ranks of a test world run beside the trainer itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrl.config.load import from_dict
from mrl.engine.base import BaseEngine
from mrl.engine.megatron.optim import optimizers_of
from mrl.engine.registry import build_engine
from mrl.trainers import sft


def make_engine(config: Mapping[str, Any]) -> BaseEngine:
    checked = from_dict(config)
    engine = build_engine(sft.role_config(checked, checked.model.path, checked.train.steps))
    engine.init_model()
    return engine


def resave(config: Mapping[str, Any], checkpoint: str) -> str:
    """Reads a checkpoint and saves it into the run's own folder, without a step."""
    engine = make_engine(config)
    state = engine.load_checkpoint(checkpoint)
    return engine.save_checkpoint(str(config["output_dir"]), global_step=state["progress"]["step"], state=state)


def step_counts(config: Mapping[str, Any], checkpoint: str) -> tuple[set[int], int, bool]:
    """After a load: AdamW's step counts over all parameters here, the schedule's step, whether gathers overlap."""
    engine = make_engine(config)
    engine.load_checkpoint(checkpoint)
    states = [state for part in optimizers_of(engine.optimizer) for state in part.optimizer.state.values()]
    overlap = any(chunk.ddp_config.overlap_param_gather for chunk in engine.chunks)
    return {int(state["step"]) for state in states}, engine.schedule_step, overlap
