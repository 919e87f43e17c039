"""Engines whose moments are in bfloat16: steps, what a checkpoint holds of them, and a resume."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from mrl.config.schema import RoleConfig
from mrl.engine.base import BaseEngine
from mrl.engine.megatron.optim import optimizers_of
from mrl.engine.torch_dist.reader import TorchDistReader
from tests.engine.contract import make_engine, train

KEYS = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
STEPS = 3


def compare(config: RoleConfig, out: str) -> dict[str, Any]:
    """Returns, on all ranks alike: dtypes of moments here and in the checkpoint; whether a resumed engine, and one that was
    given the trained state, go on to the bit; and how far the update of all steps is from that with fp32 moments."""
    rounded = dataclasses.replace(config, engine=dataclasses.replace(config.engine, megatron=KEYS))
    plain, first = make_engine(config), make_engine(rounded)
    start = {name: value.clone() for name, value in first.hf_weights()}
    train(plain, STEPS), train(first, STEPS)
    far = _far(start, plain, first)
    first.save_checkpoint(out, global_step=STEPS)
    state = first.trained_state()
    resumed, given = make_engine(rounded), make_engine(rounded)
    resumed.load_checkpoint(out)
    given.set_trained_state(state)
    given.schedule_step = first.schedule_step
    for engine in (first, resumed, given):
        train(engine, 1, first=STEPS)
    weights = dict(first.hf_weights())
    same = [
        all(torch.equal(weights[name], value) for name, value in engine.hf_weights()) for engine in (resumed, given)
    ]
    folder = next(Path(out).glob("step_*/mcore"))
    stored = TorchDistReader(folder).tensors
    return {
        "here": {str(state[name].dtype) for part in optimizers_of(first.model.optimizer)
                 for state in part.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")},
        "stored": {str(stored[key].dtype) for key in stored if key.startswith("optimizer.exp_avg")},
        "masters": {str(stored[key].dtype) for key in stored if key.startswith("optimizer.master")},
        "same": same, "far": far,
    }  # fmt: skip


def _far(start: dict[str, torch.Tensor], plain: BaseEngine, rounded: BaseEngine) -> float:
    """The difference of two updates over the one, of all weights together; 0 on ranks that are given none."""
    expected = dict(plain.hf_weights())
    differences = [(value - expected[name]).double().norm() for name, value in rounded.hf_weights()]
    moved = [(value - start[name]).double().norm() for name, value in expected.items()]
    return float(torch.stack(differences).norm() / torch.stack(moved).norm()) if moved else 0.0


def on_host(config: RoleConfig, out: str) -> dict[str, bool]:
    """Whether an optimizer on the host (`optimizer_cpu_offload`) has the weights of one that is not, to the bit: after steps
    whose gradients are clipped; resumed from a checkpoint, under either; given the trained state; and after other
    weights are loaded."""
    there = dataclasses.replace(
        config, engine=dataclasses.replace(config.engine, megatron={"optimizer_cpu_offload": True})
    )
    plain, host = make_engine(config), make_engine(there)
    train(plain, STEPS), train(host, STEPS)
    updates = _same(plain, host)
    host.save_checkpoint(out, global_step=STEPS)
    state = host.trained_state()
    resumed, back, given = make_engine(there), make_engine(config), make_engine(there)
    for engine in (resumed, back):
        engine.load_checkpoint(out)
    given.set_trained_state(state)
    given.schedule_step = host.schedule_step
    for engine in (plain, resumed, back, given):
        train(engine, 1, first=STEPS)
    found = {
        "updates": updates, "resumed": _same(plain, resumed), "on the device": _same(plain, back),
        "given": _same(plain, given),
    }  # fmt: skip
    for engine in (plain, given):  # masters follow
        engine.load_hf(config.model.path)
        train(engine, 1, first=STEPS)
    return found | {"reloaded": _same(plain, given)}


def _same(one: BaseEngine, other: BaseEngine) -> bool:
    weights = dict(one.hf_weights())
    return all(torch.equal(weights[name], value) for name, value in other.hf_weights())
