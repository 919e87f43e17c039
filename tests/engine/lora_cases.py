"""Cases of adapters in the Megatron engine; run in worlds (see harness.py) by test_lora_megatron.py, in several layouts.

`adapter` is a folder of random adapters (tiny.make_adapter); what it makes of the model is peft's to say.
"""

from __future__ import annotations

import math
import os

import torch
import torch.distributed as dist

from mrl.config.schema import RoleConfig
from mrl.engine.base import BaseEngine
from mrl.engine.guards import Problem
from mrl.engine.lora.shapes import adapter_shapes
from mrl.engine.megatron.optim import gradient_buffers, optimizers_of, shards
from mrl.engine.torch_dist.reader import TorchDistReader
from tests.engine import tiny
from tests.engine.contract import assert_equal, gradients, make_engine, train


def with_adapters(config: RoleConfig, adapter: str) -> BaseEngine:
    engine = make_engine(config)
    engine.load_adapter(adapter)
    return engine


def only_adapters_train(config: RoleConfig) -> None:
    """Gradients, masters and moments are of adapters alone (and a value head), and the weights under them stay to the bit."""
    engine = make_engine(config)
    if config.head == "value":
        engine.set_loss_fn(tiny.value_loss)
    with engine.without_adapters():
        before = {name: t.clone() for name, t in engine.hf_weights() if name != "score.weight"}
    start = {name: t.clone() for name, t in engine.adapter_weights()}
    train(engine, 3)
    with engine.without_adapters():
        assert_equal({name: t for name, t in engine.hf_weights() if name != "score.weight"}, before)
    assert all(not torch.equal(t, start[name]) for name, t in engine.adapter_weights())
    trained = {n for m in engine.model.chunks for n, p in m.named_parameters() if p.requires_grad}
    assert all(".adapter." in name or name == "output_layer.weight" and config.head == "value" for name in trained)
    here = sum(p.numel() for m in engine.model.chunks for p in m.parameters() if p.requires_grad)
    in_buffers = sum(p.numel() for b in gradient_buffers(engine.model.wrapped) for p in b.param_index_map)
    assert in_buffers == here
    states = [
        s for part in optimizers_of(engine.model.optimizer) if part.optimizer for s in part.optimizer.state.values()
    ]
    held = sum(span.stop - span.start for _, _, _, span in shards(engine.model.optimizer))
    assert sum(s["exp_avg"].numel() for s in states) == held <= here
    assert all(not hasattr(p, "main_grad") for m in engine.model.chunks for p in m.parameters() if not p.requires_grad)


def an_adapter_without_a_gradient_is_found(config: RoleConfig, adapter: str) -> None:
    """A zero gradient of B is a fault, and one of A where B is not zero."""
    engine = with_adapters(config, adapter)
    found = _problems(engine, lambda name: ".adapter.A.q_proj" in name or ".adapter.B.q_proj" in name)
    ends = [f"q_proj.lora_{part}.weight: its gradient is zero" for part in "AB"]
    assert all(any(str(problem).endswith(end) for problem in found) for end in ends), found
    assert all(str(problem).endswith(tuple(ends)) for problem in found), found


def _problems(engine: BaseEngine, zeroed) -> list[Problem]:
    """What the guards say of a step whose reduced gradients are zero where `zeroed(name)`."""
    gradients(engine, engine.shard_data(tiny.uneven_batch()))
    for model in engine.model.chunks:
        for name, parameter in model.named_parameters():
            if zeroed(name):
                parameter.main_grad.zero_()
    token = engine.guard_before_step()
    engine.optimizer_step()
    return engine.guard_after_step(token)


def checkpoint_holds_adapters_alone(config: RoleConfig, path: str) -> int:
    """Its tensors are those of the adapters' file, and their masters and moments. Returns the bytes of the folder."""
    engine = make_engine(config)
    train(engine, 1)
    saved = engine.save_checkpoint(path, global_step=1)
    if engine.is_main:
        reader = TorchDistReader(os.path.join(saved, "mcore"))
        expected = adapter_shapes(engine.model.adapters, config.head, engine.model.hf["hidden_size"])
        keys = {f"{prefix}{name}" for name in expected for prefix in _KINDS}
        assert set(reader.tensors) == keys, sorted(set(reader.tensors) ^ keys)
        sizes = {name: math.prod(reader.tensors[name].shape) for name in expected}
        assert sizes == {name: math.prod(shape) for name, shape in expected.items()}
    size = sum(os.path.getsize(os.path.join(d, f)) for d, _, files in os.walk(saved) for f in files)
    dist.barrier()
    return size


_KINDS = ("", "optimizer.master.", "optimizer.exp_avg.", "optimizer.exp_avg_sq.")


def start_of(config: RoleConfig) -> dict[str, float] | None:
    """A checksum of each adapter tensor at the start."""
    engine = make_engine(config)
    sums = {
        name: float((t.double() * torch.arange(t.numel()).view_as(t)).sum()) for name, t in engine.adapter_weights()
    }
    return sums if engine.is_main else None
