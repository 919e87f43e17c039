"""What goes between ranks once a mini-batch (`engine.fsdp.defer_sync`), and weights of a rank that holds the whole model, which
stay gathered over one: the same numbers, fewer copies, and bytes that a plan knows. Rows of parity_rows.py have both, too."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import pytest
import torch

from mrl.config.schema import FSDPConfig, LoraConfig, RoleConfig
from mrl.engine.fsdp.precision import stays_gathered
from mrl.engine.fsdp.shapes import shapes_of
from tests.engine import tiny
from tests.engine.contract import assert_close, assert_equal, gradients, loss_fn, make_engine, train
from tests.engine.harness import run_case
from tests.operators import Operators
from tests.tiers import in_tiers

KINDS = {
    "weights kept in fp32": ("ernie4_5_moe", {"dtype": "bfloat16", "packing": False, "recompute": "full"}),
    "offload": ("qwen3", {"offload": ("parameters", "gradients", "optimizer"), "fsdp": FSDPConfig(reshard_after_forward=False)}),
    "adapters": ("llama", {"dtype": "bfloat16", "model": {"lora": LoraConfig(rank=4)}}),
}  # fmt: skip


@pytest.fixture(params=KINDS)
def config(request, folder):
    family, options = KINDS[request.param]
    return tiny.role(folder(family), size=2, **options)


def test_one_process_has_the_same_numbers_to_the_bit(config):
    """Of two steps, so that weights that trained are gathered anew; of a forward alone; and of gradients of micro-batches.

    Where the sums of mini-batches are added, and not one micro-batch after another, two of them differ by rounding."""
    fsdp, batches, found = config.engine.fsdp, [tiny.uneven_batch(seed) for seed in (0, 1)], []
    for stays, deferred in ((False, False), (True, False), (True, True)):
        own = dataclasses.replace(config.engine, fsdp=dataclasses.replace(fsdp, defer_sync=deferred))
        engine = make_engine(dataclasses.replace(config, engine=own))
        assert deferred or engine.model.stays_gathered
        engine.model.stays_gathered &= stays
        steps = train(engine, 2)
        with engine.eval_mode():
            predictions, _ = engine.forward_backward_step(batches[0], forward_only=True)
        of_one, of_both = (gradients(engine, *some)[1] for some in (batches[:1], batches))
        found.append((steps, predictions["log_probs"], of_one, of_both))
    plain, gathered, deferred = found
    for steps, log_probs, of_one, _ in (gathered, deferred):
        assert steps == plain[0] and torch.equal(log_probs, plain[1])
        assert_equal(of_one, plain[2])
    assert_equal(gathered[3], plain[3])
    assert_close(deferred[3], plain[3], 1e-6)


def test_each_weight_is_copied_once_a_mini_batch(config):
    """And a plan knows the bytes of the copies."""
    engine, gathered = make_engine(config), {}

    def looks(*given):
        gathered.update({p.untyped_storage()._cdata: p.nbytes for p in engine.model.module.parameters()})
        return loss_fn(*given)

    engine.set_loss_fn(looks)
    engine.optimizer_zero_grad()
    with Operators() as operators, engine.train_mode():
        engine.forward_backward_step(tiny.uneven_batch())
    number = len(list(engine.model.module.parameters()))
    into = [args[0].untyped_storage()._cdata for f, args in operators.calls if f is torch.ops.aten.copy_.default]
    assert len(gathered) == number == sum(one in gathered for one in into)
    assert sum(gathered.values()) == sum(shape.held(1) * shape.gathered for shape in shapes_of(config)[0])


@pytest.mark.parametrize(
    "gathered, shards, gpu_memory, stays",
    [(2**40, 1, None, True), (5 * 2**30, 1, 80 * 2**30, True), (5 * 2**30 + 1, 1, 80 * 2**30, False), (1, 2, None, False)],
)  # fmt: skip
def test_where_memory_allows(gathered, shards, gpu_memory, stays):
    assert stays_gathered(gathered, shards, gpu_memory) == stays


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


@pytest.mark.parametrize(
    ("keys", "gathered", "reduced", "in_forward"),
    in_tiers(
        [],
        [({"defer_sync": True}, 2 * 4, 2 * 4, 4)],
        [
            ({"defer_sync": True}, 2 * 4, 2 * 4, 4),
            ({}, 2 * 4 * 8, 2 * 4 * 4, 4 * 4),  # weights are gathered for the backward pass, too
            ({"reshard_after_forward": False}, 2 * 4 * (4 + 1), 2 * 4 * 4, 3 + 4),  # but the root's rest: it is freed
        ],
    ),
)
def test_weights_travel_once_a_mini_batch(folder, keys, gathered, reduced, in_forward):
    """Of four units (two blocks, embedding, the rest), four micro-batches and two mini-batches."""
    expected = {"train gathered": gathered, "train reduced": reduced, "forward gathered": in_forward}
    config = tiny.role(folder("llama"), size=1, backend="fsdp", fsdp=FSDPConfig(**keys))
    run_case(2, "tests.engine.test_fsdp_defer:collectives", config=config, expected=expected)


@pytest.mark.parametrize("deferred, dtype", [(False, "float32"), (True, "float32"), (True, "bfloat16")])
def test_a_mini_batch_that_ended_in_an_error_leaves_nothing(folder, deferred, dtype):
    """As where memory ran out and a server goes on: neither gathered weights nor sums of its first micro-batches."""
    engine = make_engine(tiny.role(folder("llama"), size=2, dtype=dtype, fsdp=FSDPConfig(defer_sync=deferred)))
    batch, calls = tiny.uneven_batch(), itertools.count()

    def fails(*given):
        if next(calls) == 2:
            raise torch.OutOfMemoryError("in the third micro-batch")
        return loss_fn(*given)

    expected = gradients(engine, batch)[1]
    engine.set_loss_fn(fails)
    with pytest.raises(torch.OutOfMemoryError):
        gradients(engine, batch)
    with torch.no_grad():
        for p in engine.model.trained().values():
            p.mul_(1.0)  # an error if the module held what is gathered
    engine.set_loss_fn(loss_fn)
    assert_equal(gradients(engine, batch)[1], expected)
