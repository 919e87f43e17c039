"""`engine.fsdp.defer_sync`: what goes between ranks once a mini-batch, and numbers as without it (its rows of parity_rows.py, too)."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import pytest
import torch

from mrl.config.schema import FSDPConfig, LoraConfig, RoleConfig
from tests.engine import tiny
from tests.engine.contract import assert_close, assert_equal, gradients, loss_fn, make_engine, train
from tests.engine.harness import run_case


@pytest.mark.parametrize(
    "family, options",
    [
        ("ernie4_5_moe", {"dtype": "bfloat16", "packing": False, "recompute": "full"}),  # with weights kept in fp32
        ("qwen3", {"offload": ("parameters", "gradients", "optimizer"), "fsdp": {"reshard_after_forward": False}}),
        ("llama", {"dtype": "bfloat16", "model": {"lora": LoraConfig(rank=4)}}),
    ],
    ids=["bfloat16", "offload", "adapters"],
)
def test_one_process_has_the_same_numbers_to_the_bit(folder, family, options):
    """Gradients of micro-batches add up in fp32 in the same order, and weights that trained are gathered anew. Of two
    mini-batches the sums are added, not one micro-batch after another."""
    options = {"size": 2, **options}
    fsdp = FSDPConfig(**options.pop("fsdp", {}))
    path, batches = folder(family), [tiny.uneven_batch(seed) for seed in (0, 1)]
    found = []
    for each in (fsdp, dataclasses.replace(fsdp, defer_sync=True)):
        engine = make_engine(tiny.role(path, fsdp=each, **options))
        steps = train(engine, 2)
        with engine.eval_mode():
            predictions, _ = engine.forward_backward_step(batches[0], forward_only=True)
        found.append(
            (steps, predictions["log_probs"], gradients(engine, batches[0])[1], gradients(engine, *batches)[1])
        )
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])
    assert_equal(found[1][2], found[0][2])
    assert_close(found[1][3], found[0][3], 1e-6)


def collectives(config: RoleConfig, expected: dict[str, int]) -> None:
    """Of two mini-batches of several micro-batches each, and of a forward alone: how often weights are gathered and
    gradients reduced."""
    engine = make_engine(config)
    share = engine.shard_data(tiny.uneven_batch(sequences=8))
    found: Counter[str] = Counter()
    for forward_only in (False, False, True):
        mode = engine.eval_mode() if forward_only else engine.train_mode()
        with mode, torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            engine.forward_backward_step(share, forward_only=forward_only)
        kind = "forward" if forward_only else "train"
        for event in profile.events():
            name = {"c10d::_allgather_base_": "gathered", "c10d::_reduce_scatter_base_": "reduced"}.get(event.name)
            found[f"{kind} {name}"] += 1
    del found["train None"], found["forward None"]
    assert found == expected, found


@pytest.mark.parametrize("deferred", [False, True])
def test_weights_travel_once_a_mini_batch(folder, deferred):
    """Of four units (two blocks, embedding, the rest), four micro-batches and two mini-batches."""
    expected = {"train gathered": 2 * 4, "train reduced": 2 * 4, "forward gathered": 4}
    if not deferred:  # and weights are gathered for the backward pass, too
        expected = {"train gathered": 2 * 4 * 8, "train reduced": 2 * 4 * 4, "forward gathered": 4 * 4}
    config = tiny.role(folder("llama"), size=1, backend="fsdp", fsdp=FSDPConfig(defer_sync=deferred))
    run_case(2, "tests.engine.test_fsdp_defer:collectives", config=config, expected=expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mini_batch_that_ended_in_an_error_leaves_nothing(folder, dtype):
    """As where memory ran out and a server goes on: what its first micro-batches summed is in no later gradient."""
    engine = make_engine(tiny.role(folder("llama"), size=2, dtype=dtype, fsdp=FSDPConfig(defer_sync=True)))
    batch, calls = tiny.uneven_batch(), itertools.count()

    def fails(*given):
        if next(calls) == 2:
            raise torch.OutOfMemoryError("in the third micro-batch")
        return loss_fn(*given)

    expected = gradients(engine, batch)[1]
    engine.set_loss_fn(fails)
    with pytest.raises(torch.OutOfMemoryError):
        gradients(engine, batch)
    engine.set_loss_fn(loss_fn)
    assert_equal(gradients(engine, batch)[1], expected)
