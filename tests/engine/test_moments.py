"""Moments in bfloat16 (`use_precision_aware_optimizer`): what is rounded, and when; a checkpoint; a resume."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.config.schema import RoleConfig
from mrl.engine.base import BaseEngine
from mrl.engine.megatron.engine import MegatronEngine  # noqa: F401  (prepares megatron for this machine)
from mrl.engine.megatron.optim import optimizers_of
from mrl.engine.megatron.rounded_adam import RoundedAdamW
from mrl.engine.torch_dist.reader import TorchDistReader
from tests.engine import tiny
from tests.engine.contract import make_engine, train
from tests.engine.harness import run_case

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


ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, FP32), (BF16, BF16)], ids=str)
def test_an_update_is_torchs_and_moments_are_rounded_behind_it(dtypes):
    names = dict(zip(("exp_avg", "exp_avg_sq"), dtypes, strict=True))
    start = torch.randn(257, generator=torch.Generator().manual_seed(0))
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    rounded = RoundedAdamW.from_adam(torch.optim.AdamW([ours], **ADAMW), names)
    plain = torch.optim.AdamW([theirs], **ADAMW)
    for seed in range(5):
        ours.grad = torch.randn(257, generator=torch.Generator().manual_seed(seed))
        theirs.grad = ours.grad.clone()
        plain.step()
        for name, dtype in names.items():  # what the next update finds
            state = plain.state[theirs]
            state[name] = state[name].to(dtype).float()
        rounded.step()
        assert (ours - theirs).abs().max() < 1e-7, f"update {seed}"
        for name, dtype in names.items():
            kept = rounded.state[ours][name]
            assert kept.dtype == dtype
            # of two kernels, one may round a number that lies between two of bfloat16 the other way
            assert torch.allclose(
                kept.float(), plain.state[theirs][name], rtol=2**-8 if dtype == BF16 else 1e-6, atol=0
            )


@pytest.mark.parametrize(
    "world, parallel, dtype",
    [(2, {}, "bfloat16"), pytest.param(4, {"tp": 2, "pp": 2}, "float32", marks=pytest.mark.nightly)],
)
def test_an_optimizer_on_the_host_makes_the_same_updates_to_the_bit(tmp_path, world, parallel, dtype):
    """On a CPU, whose kernel both then have; and a checkpoint of the one goes on with the other."""
    folder = tiny.make_model(str(tmp_path / "model"), "qwen3")
    config = tiny.role(folder, backend="megatron", parallel=parallel, size=2, dtype=dtype)
    found = run_case(world, "tests.engine.test_moments:on_host", config=config, out=str(tmp_path / "out"))
    assert found == {"updates": True, "resumed": True, "on the device": True, "given": True, "reloaded": True}


@pytest.mark.parametrize(
    "world, parallel, dtype, bound",
    [(2, {}, "float32", 2**-7), pytest.param(4, {"tp": 2, "pp": 2}, "bfloat16", 2**-5, marks=pytest.mark.nightly)],
)
def test_a_checkpoint_has_them_and_a_run_goes_on_to_the_bit(tmp_path, world, parallel, dtype, bound):
    """A moment is rounded to 8 bits of significand (2^-9 relative) each step, of which a few steps' update shows less than
    2^-7; weights in bfloat16 are rounded themselves, to 2^-9 of what they are and not of the update."""
    folder = tiny.make_model(str(tmp_path / "model"), "qwen3")
    config = tiny.role(folder, backend="megatron", parallel=parallel, size=2, dtype=dtype)
    found = run_case(world, "tests.engine.test_moments:compare", config=config, out=str(tmp_path / "out"))
    assert found["here"] == found["stored"] == {"torch.bfloat16"} and found["masters"] == {"torch.float32"}
    assert found["same"] == [True, True] and 0 < found["far"] < bound, found
