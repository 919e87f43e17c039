"""Engines that train with Muon, for worlds of processes: what they make of a model, held against plain torch's."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from mrl.config.schema import RoleConfig
from mrl.engine.megatron.muon import Muon
from mrl.engine.megatron.optim import optimizers_of
from tests.engine import contract, tiny

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
