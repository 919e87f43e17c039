"""Muon: its arithmetic against torch's, and engines in any layout against plain torch on Hugging Face's model.

The reference (mrl/check/reference.py) has whole matrices and fp64 products. Newton-Schulz steps stretch small singular values up to
500 times (3.4445 to the fifth), and with them what fp32 gradients have of rounding: hence 1e-3 of an update, as with AdamW.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from mrl.config.schema import RoleConfig
from mrl.config.sections import MuonConfig
from mrl.engine.megatron.engine import MegatronEngine  # noqa: F401  (prepares megatron for this machine)
from mrl.engine.megatron.muon import Muon, orthogonalise
from mrl.engine.megatron.optim import optimizers_of
from tests.engine import contract, tiny
from tests.engine.harness import run_case
from tests.tiers import in_tiers

OPTIMIZER = dataclasses.replace(tiny.OPTIMIZER, name="muon", lr=2e-2)


def updates(config: RoleConfig, expected: str) -> dict[str, Any]:
    """Returns, on the main process: how far the update of all steps of each tensor is from that of the reference, whose
    numbers `torch.save` wrote to `expected`; how far losses and gradient norms are; and on how many ranks a matrix is
    divided over data-parallel ranks."""
    reference = torch.load(expected, weights_only=True)
    engine = contract.make_engine(config)
    start = {name: value.clone() for name, value in engine.hf_weights()}
    batch, losses, norms = tiny.uneven_batch(), [], []
    for _ in range(tiny.STEPS):
        engine.optimizer_zero_grad()
        with engine.train_mode():
            losses.append(engine.forward_backward_step(engine.shard_data(batch))[1])
        norms.append(float(engine.optimizer_step()))
        engine.lr_scheduler_step()
    optimizers = [part.optimizer for part in optimizers_of(engine.model.optimizer)]
    divided = engine.max_over_ranks(sum(len(of.divided) for of in optimizers if isinstance(of, Muon)))[0]
    far = {
        name: tiny.relative_l2(value - start[name], reference["weights"][name] - start[name])
        for name, value in engine.hf_weights()
    }
    return {
        "far": far, "divided": divided,
        "losses": max(abs(a / b - 1) for a, b in zip(losses, reference["losses"], strict=True)),
        "norms": max(abs(a / b - 1) for a, b in zip(norms, reference["grad_norms"], strict=True)),
    }  # fmt: skip


def keeps(config: RoleConfig, path: str) -> dict[str, bool]:
    """A resume, offloaded state and micro-batches of another size; whether a trained state that is put back goes on, and a
    checkpoint of AdamW is refused."""
    contract.resume_is_bitwise(config, f"{path}/own")
    contract.offloaded_state_gives_the_same_numbers(config)
    contract.guards_find_nothing_on_a_right_step(config)
    first, other = contract.make_engine(config), contract.make_engine(config)
    contract.train(first, 2)
    other.set_trained_state(first.trained_state())
    other.schedule_step = first.schedule_step
    went_on = contract.train(first, 2, first=2) == contract.train(other, 2, first=2)
    adamw = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, name="adamw"))
    contract.save_after(adamw, f"{path}/adamw")
    contract.refuses_checkpoint(config, f"{path}/adamw", "momentum")
    return {"trained state": went_on}


UPDATE = 1e-3


@pytest.mark.parametrize("shape", [(48, 32), (32, 48), (32, 32), (1, 32)], ids=str)
def test_newton_schulz_steps_are_torchs(shape):
    """torch.optim.Muon has them in bfloat16 alone; in fp32 they are the polynomial of the singular values."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    parameter = torch.nn.Parameter(torch.zeros(shape))
    parameter.grad = matrix.clone()
    torch.optim.Muon(
        [parameter], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="original"
    ).step()
    scale = max(1, shape[0] / shape[1]) ** 0.5
    assert torch.allclose(
        orthogonalise(matrix, 5, torch.bfloat16).float() * scale, -parameter.detach(), rtol=1e-6, atol=0
    )
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm()
    for _ in range(3):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    expected = left @ torch.diag(values) @ right
    assert tiny.relative_l2(orthogonalise(matrix, 3, torch.float32), expected.float()) < 1e-5


ALL_KEYS = {
    "scale_mode": "shape_scaling", "extra_scale_factor": 1.0, "momentum": 0.5, "use_nesterov": False, "num_ns_steps": 2,
}  # fmt: skip

# family, processes, layout, whether a data-parallel boundary goes through a matrix, keys of optimizer.muon
LAYOUTS = [
    ("qwen3", 1, {}, False, ALL_KEYS),
    ("qwen3_5", 2, {"tp": 2}, False, {}),  # a linear of four matrices, convolutions and parameters of heads
    ("qwen3_moe", 2, {}, True, {}),
    ("qwen2", 4, {"tp": 4}, False, {}),  # more ranks than key-value heads
    ("gpt_oss", 2, {"ep": 2}, True, {}),
    ("qwen3_moe", 4, {"tp": 2, "etp": 1, "ep": 2}, True, {}),
    ("deepseek_v3", 4, {"tp": 2, "pp": 2, "ep": 2}, False, {"scale_mode": "unit_rms_norm"}),
    ("glm4_moe", 4, {"tp": 2, "cp": 2}, True, {}),
]


@pytest.mark.parametrize(
    ("family", "world", "parallel", "divided", "keys"),
    in_tiers(LAYOUTS[:3], [LAYOUTS[4], LAYOUTS[6]], LAYOUTS),
    ids=str,
)
def test_updates_are_those_of_whole_matrices_in_every_layout(tmp_path, family, world, parallel, divided, keys):
    folder = tiny.make_model(str(tmp_path / "model"), family)
    optimizer = dataclasses.replace(OPTIMIZER, muon=MuonConfig(**keys))
    reference = tiny.hf_reference(folder, tiny.uneven_batch(), optimizer=optimizer)
    torch.save(dataclasses.asdict(reference), tmp_path / "reference.pt")
    small_buckets = {"overlap_grad_reduce": True, "bucket_size": 3000}
    config = tiny.role(
        folder, backend="megatron", parallel=parallel, size=2, optimizer=optimizer, megatron=small_buckets
    )
    found = run_case(world, "tests.engine.test_muon:updates", config=config, expected=str(tmp_path / "reference.pt"))
    assert bool(found["divided"]) == divided, found["divided"]
    assert found["losses"] < 1e-5 and found["norms"] < 1e-4, found
    assert not {name: far for name, far in found["far"].items() if not far < UPDATE}


@pytest.mark.parametrize(
    ("world", "parallel", "dtype"),
    [(2, {}, "bfloat16"), pytest.param(4, {"tp": 2, "pp": 2}, "float32", marks=pytest.mark.nightly)],
    ids=str,
)
def test_state_is_kept_to_the_bit(tmp_path, world, parallel, dtype):
    folder = tiny.make_model(str(tmp_path / "model"), "qwen3")
    config = tiny.role(folder, backend="megatron", parallel=parallel, size=2, dtype=dtype, optimizer=OPTIMIZER)
    assert run_case(world, "tests.engine.test_muon:keeps", config=config, path=str(tmp_path)) == {"trained state": True}


@pytest.mark.slow
def test_a_checkpoint_goes_on_in_another_layout(tmp_path):
    folder, path = tiny.make_model(str(tmp_path / "model"), "qwen3_moe"), str(tmp_path / "saved")
    here, there = (
        tiny.role(folder, backend="megatron", parallel=parallel, size=2, optimizer=OPTIMIZER)
        for parallel in ({}, {"tp": 2, "ep": 2})
    )
    expected = run_case(2, "tests.engine.contract:save_after", config=here, path=path)
    run_case(4, "tests.engine.contract:go_on", config=there, path=path, expected=expected)
