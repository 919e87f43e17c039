"""Weights of a rank that holds the whole model stay gathered over a mini-batch: the same numbers, fewer copies, and bytes
that a plan knows."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mrl.config.schema import FSDPConfig, LoraConfig
from mrl.engine.fsdp.precision import stays_gathered
from mrl.engine.fsdp.shapes import shapes_of
from tests.engine import tiny
from tests.engine.contract import assert_equal, gradients, loss_fn, make_engine, train

KINDS = {
    "weights kept in fp32": ("ernie4_5_moe", {"dtype": "bfloat16", "packing": False, "recompute": "full"}),
    "offload": ("qwen3", {"offload": ("parameters", "gradients", "optimizer")}),
    "kept after a forward": ("llama", {"dtype": "bfloat16", "fsdp": FSDPConfig(reshard_after_forward=False)}),
    "adapters": ("llama", {"dtype": "bfloat16", "model": {"lora": LoraConfig(rank=4)}}),
}


class Copies(TorchDispatchMode):
    """Notes the storages that something is copied into."""

    def __init__(self) -> None:
        super().__init__()
        self.into = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.into.append(args[0].untyped_storage()._cdata)
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=KINDS)
def config(request, folder):
    family, options = KINDS[request.param]
    return tiny.role(folder(family), size=2, **options)


def test_numbers_are_those_of_weights_gathered_for_each_pass(config):
    """Of two steps, so that the second has what the first changed; of a forward alone; and of two mini-batches."""
    batches, found = [tiny.uneven_batch(seed) for seed in (0, 1)], []
    for stays in (False, True):
        engine = make_engine(config)
        assert engine.model.stays_gathered
        engine.model.stays_gathered = stays
        steps = train(engine, 2)
        with engine.eval_mode():
            predictions, _ = engine.forward_backward_step(batches[0], forward_only=True)
        found.append((steps, predictions["log_probs"], gradients(engine, *batches)[1]))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])
    assert_equal(found[1][2], found[0][2])


def test_each_weight_is_copied_once_a_mini_batch(config):
    """And a plan knows the bytes of the copies."""
    engine, gathered = make_engine(config), {}

    def looks(*given):
        gathered.update({p.untyped_storage()._cdata: p.nbytes for p in engine.model.module.parameters()})
        return loss_fn(*given)

    engine.set_loss_fn(looks)
    engine.optimizer_zero_grad()
    with Copies() as copies, engine.train_mode():
        engine.forward_backward_step(tiny.uneven_batch())
    number = len(list(engine.model.module.parameters()))
    assert len(gathered) == number == sum(one in gathered for one in copies.into)
    assert sum(gathered.values()) == sum(shape.held(1) * shape.gathered for shape in shapes_of(config)[0])


def test_an_error_leaves_no_gathered_weights(folder):
    engine = make_engine(tiny.role(folder(), size=2))
    expected = gradients(engine, tiny.uneven_batch())[1]

    def fails(*_):
        raise torch.OutOfMemoryError("in a micro-batch")

    engine.set_loss_fn(fails)
    with pytest.raises(torch.OutOfMemoryError):
        gradients(engine, tiny.uneven_batch())
    with torch.no_grad():
        for p in engine.model.trained().values():
            p.mul_(1.0)  # an error if the module held what is gathered
    engine.set_loss_fn(loss_fn)
    assert_equal(gradients(engine, tiny.uneven_batch())[1], expected)


@pytest.mark.parametrize(
    "gathered, shards, gpu_memory, stays",
    [(2**40, 1, None, True), (5 * 2**30, 1, 80 * 2**30, True), (5 * 2**30 + 1, 1, 80 * 2**30, False), (1, 2, None, False)],
)  # fmt: skip
def test_where_memory_allows(gathered, shards, gpu_memory, stays):
    assert stays_gathered(gathered, shards, gpu_memory) == stays
