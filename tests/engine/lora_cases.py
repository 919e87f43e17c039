"""Cases of adapters in the Megatron engine; run in worlds (see harness.py) by test_lora_megatron.py, in several layouts.

`adapter` is a folder of random adapters (tiny.make_adapter); what it makes of the model is peft's to say.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from mrl.batch import Batch, make_batch
from mrl.check.reference import file_names
from mrl.config.schema import RoleConfig
from mrl.engine import guards
from mrl.engine.base import BaseEngine, GenerateRequest
from mrl.engine.guards import FaultKind, Problem
from mrl.engine.lora.shapes import adapter_shapes
from mrl.engine.megatron.optim import gradient_buffers, optimizers_of, shards
from mrl.engine.sampling import SamplingKey, SamplingParams
from mrl.engine.torch_dist.reader import TorchDistReader
from tests.engine import tiny
from tests.engine.contract import assert_equal, gradients, make_engine, train


def with_adapters(config: RoleConfig, adapter: str) -> BaseEngine:
    engine = make_engine(config)
    engine.load_adapter(adapter)
    return engine


def log_probs(engine: BaseEngine, batch: Batch) -> Tensor:
    share = engine.shard_data(batch)
    with engine.eval_mode():
        predictions, _ = engine.forward_backward_step(share, forward_only=True)
    return engine.unshard_data({"log_probs": predictions["log_probs"]}, batch)["log_probs"].cpu()


def peft_log_probs(folder: str, adapter: str, batch: Batch) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.enable_grad():  # tiny's reference takes the gradient too
        return tiny.hf_loss(PeftModel.from_pretrained(model, adapter, is_trainable=True), batch, "lm")[1]


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


def guards_know_that_b_starts_at_zero(config: RoleConfig, adapter: str) -> None:
    """A's gradient is zero at the start, and is no fault; a zero gradient of B is one, and of A where B is not zero."""
    engine = make_engine(config)
    found = _problems(engine, lambda name: ".adapter.B.q_proj" in name)
    waiting = [p.parameter for p in found if p.kind is FaultKind.WAITS]
    assert waiting and all("lora_A.weight" in name for name in waiting), found
    assert guards.confirmed_faults(found), found
    assert all("q_proj.lora_B.weight: its gradient is zero" in str(p) for p in guards.confirmed_faults(found)), found
    engine = with_adapters(config, adapter)
    found = _problems(engine, lambda name: ".adapter.A.q_proj" in name)
    assert found and all(str(p).endswith("q_proj.lora_A.weight: its gradient is zero") for p in found), found


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
        reader.close()
    size = sum(os.path.getsize(os.path.join(d, f)) for d, _, files in os.walk(saved) for f in files)
    dist.barrier()
    return size


_KINDS = ("", "optimizer.master.", "optimizer.exp_avg.", "optimizer.exp_avg_sq.")


def agrees_with_peft(config: RoleConfig, adapter: str, path: str) -> None:
    """Log-probs with the adapters, those of the weights they are added into, and of the folder that is exported."""
    batch, atol = tiny.uneven_batch(sequences=6), 5e-6 if dist.get_world_size() == 1 else 2e-5
    batch = dataclasses.replace(batch, loss_mask=torch.ones_like(batch.loss_mask)).with_denominators()
    engine, base = with_adapters(config, adapter), config.model.path
    found = log_probs(engine, batch)
    torch.testing.assert_close(found, peft_log_probs(base, adapter, batch), rtol=0, atol=atol)
    engine.export_hf(path)
    weights = {name: t.clone() for name, t in engine.hf_weights()}
    assert_equal(dict(engine.hf_weights()), weights)
    assert torch.equal(log_probs(engine, batch), found)
    if engine.is_main:
        assert_equal(load_file(f"{path}/adapter_model.safetensors"), load_file(f"{adapter}/adapter_model.safetensors"))
        merged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), path)
        merged = merged.merge_and_unload()
        expected = file_names(merged, {n: t.detach() for n, t in merged.named_parameters()})
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-6)
    dist.barrier()
    torch.testing.assert_close(found, peft_log_probs(base, path, batch), rtol=0, atol=atol)


def is_the_base_model_without_adapters(config: RoleConfig, adapter: str) -> None:
    """To the bit, for a forward and for completions; and with them again afterwards."""
    batch = tiny.uneven_batch(sequences=6)
    plain = make_engine(dataclasses.replace(config, model=dataclasses.replace(config.model, lora=None), optimizer=None))
    engine = with_adapters(config, adapter)
    with_them = log_probs(engine, batch)
    with engine.without_adapters():
        assert torch.equal(log_probs(engine, batch), log_probs(plain, batch))
        assert engine.generate(_requests()) == plain.generate(_requests())
    assert torch.equal(log_probs(engine, batch), with_them)
    assert (log_probs(plain, batch) - with_them).abs().max() > 0.01


def _requests() -> list[GenerateRequest]:
    key = SamplingKey(3, 1, 0, 0)
    prompts = [[5, 9, 30, 4], [77], [8, 12, 13, 14, 15, 16, 17]]
    return [GenerateRequest(p, 5 + i, (), SamplingParams(1.0), key) for i, p in enumerate(prompts)]


def generates_with_adapters(config: RoleConfig, adapter: str) -> list[list[int]]:
    """Completions have the log-probs that a forward gives them. Returns their tokens."""
    engine = with_adapters(config, adapter)
    requests = _requests()
    completions = engine.generate(requests)
    rows = [list(r.tokens) + c.tokens for r, c in zip(requests, completions, strict=True)]
    masks = [[0.0] * len(r.tokens) + [1.0] * len(c.tokens) for r, c in zip(requests, completions, strict=True)]
    batch = make_batch(rows, masks)
    scored = log_probs(engine, batch)[batch.loss_mask.bool()]
    torch.testing.assert_close(torch.tensor([x for c in completions for x in c.log_probs]), scored, rtol=0, atol=2e-5)
    return [c.tokens for c in completions]


def dropout_of_adapters(config: RoleConfig, adapter: str) -> None:
    """It is on in training and off in eval mode (trap 18); ranks that share an input drop the same, and stay equal."""
    engine = with_adapters(config, adapter)
    batch = tiny.uneven_batch()
    share = engine.shard_data(batch)

    def training_loss() -> float:
        (result,), _ = gradients(engine, share)
        return result[1]

    first, second = training_loss(), training_loss()
    assert first != second
    assert torch.equal(log_probs(engine, batch), log_probs(engine, batch))
    assert _problems(engine, lambda name: False) == []


def start_of(config: RoleConfig) -> dict[str, float] | None:
    """A checksum of each adapter tensor at the start."""
    engine = make_engine(config)
    sums = {
        name: float((t.double() * torch.arange(t.numel()).view_as(t)).sum()) for name, t in engine.adapter_weights()
    }
    return sums if engine.is_main else None


def save_adapters(config: RoleConfig, path: str) -> dict[str, Any]:
    """Two steps and a save. Returns adapters and history of one step more."""
    engine = make_engine(config)
    train(engine, 2)
    engine.save_checkpoint(path, global_step=2)
    before = dict(engine.adapter_weights())
    return {"adapters": before, "history": train(engine, 1, first=2), "after": dict(engine.adapter_weights())}


def load_adapters(config: RoleConfig, path: str, expected: dict[str, Any]) -> None:
    """Another layout reads them bit for bit, with the optimizer's state, and goes on within rounding."""
    engine = make_engine(config)
    engine.load_checkpoint(path)
    found = dict(engine.adapter_weights())
    (loss, norm, lr, _), (a, b, c, _) = train(engine, 1, first=2)[0], expected["history"][0]
    after = dict(engine.adapter_weights())
    if engine.is_main:
        assert_equal(found, expected["adapters"])
        for name, tensor in expected["after"].items():
            assert tiny.relative_l2(after[name] - found[name], tensor - found[name]) < 1e-3, name
    assert abs(loss / a - 1) < 1e-5 and abs(norm / b - 1) < 1e-4 and lr == c
