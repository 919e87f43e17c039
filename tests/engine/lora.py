"""LoRA on any engine, against PEFT on plain Hugging Face: functions for worlds of processes (see harness.py). Losses, gradients
and updates are in the parity table (parity.py)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import peft
import torch
import torch.distributed.checkpoint as dcp
from peft.tuners.lora.layer import LoraLayer
from safetensors.torch import load_file
from torch import Tensor

from mrl.algorithms.sft import sft_loss
from mrl.batch import Batch, make_batch
from mrl.check.reference import file_names
from mrl.config.schema import LoraConfig, RoleConfig
from mrl.engine.base import BaseEngine, GenerateRequest
from mrl.engine.guards import FaultKind, Problem
from mrl.engine.lora.folder import adapters, read_adapter
from mrl.engine.lora.shapes import adapter_shapes, initial_a
from mrl.engine.registry import build_engine
from mrl.engine.sampling import SamplingKey, SamplingParams
from mrl.errors import ModelError
from tests.engine import contract, tiny
from tests.engine.tiny import HEADS

LOG_PROB = 1e-5


def random_adapter(folder: str, lora: LoraConfig, head: str = "lm", seed: int = 1) -> dict[str, Tensor]:
    """Every tensor of an adapter's file: A as at the start, B and the score random."""
    shapes = adapters(folder, lora, head)
    generator = torch.Generator().manual_seed(seed)
    named = adapter_shapes(shapes, head, hidden_size=32)
    made = {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in named.items()}
    return made | {shape.a_name: initial_a(shape, seed=0) for shape in shapes.values()}


def peft_model(folder: str, adapter: str, head: str = "lm") -> peft.PeftModel:
    """What a user of peft loads."""
    base = HEADS[head].from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return peft.PeftModel.from_pretrained(base, adapter, is_trainable=True)


def merged_by_peft(folder: str, adapter: str, head: str = "lm") -> dict[str, Tensor]:
    """What `merge_and_unload` makes of the model, by name in files."""
    whole = peft_model(folder, adapter, head).merge_and_unload()
    return file_names(whole, {name: p.detach() for name, p in whole.named_parameters()})


# -- in a world of processes -------------------------------------------------------------------------------------------


def make_engine(config: RoleConfig, tensors: Mapping[str, Tensor] | None = None) -> BaseEngine:
    engine = build_engine(config)
    engine.init_model()
    engine.set_loss_fn(sft_loss if config.head == "lm" else tiny.value_loss)
    if tensors is not None:
        engine.set_adapters(tensors)
    return engine


def assert_merged(merged: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    parameters = {
        name: t for name, t in merged.items() if not name.endswith("e_score_correction_bias")
    }  # a buffer, there
    contract.assert_close(parameters, {name: expected[name] for name in parameters}, 1e-6)
    assert set(expected) - set(parameters) <= {"lm_head.weight"}  # tied


def predictions_of_engine(engine: BaseEngine, batch: Batch) -> Tensor:
    """[T] of the whole batch: log-probs, or values."""
    name = "log_probs" if engine.config.head == "lm" else "values"
    with engine.eval_mode():
        predictions, _ = engine.forward_backward_step(engine.shard_data(batch), forward_only=True)
    return engine.unshard_data({name: predictions[name]}, batch)[name].cpu()


def starts_as_the_base(config: RoleConfig) -> None:
    """B = 0: to the bit the model without adapters. Switched off, adapters of any values change nothing either."""
    plain = make_engine(dataclasses.replace(config, model=dataclasses.replace(config.model, lora=None)))
    batch, engine = tiny.uneven_batch(), make_engine(config)
    base = predictions_of_engine(plain, batch)
    assert torch.equal(predictions_of_engine(engine, batch), base)
    contract.assert_equal(dict(engine.hf_weights()), dict(plain.hf_weights()))
    engine.set_adapters(random_adapter(config.model.path, config.model.lora, config.head))
    assert not torch.equal(predictions_of_engine(engine, batch), base)
    if config.head == "lm":
        with engine.without_adapters():
            assert torch.equal(predictions_of_engine(engine, batch), base)
        assert not torch.equal(predictions_of_engine(engine, batch), base)


def first_steps_are_guarded(config: RoleConfig) -> None:
    """A waits for B in the first step, which is said of each A and of nothing else; then everything trains."""
    engine = make_engine(config)
    shapes = adapters(config.model.path, config.model.lora, config.head)
    found = []
    for step in range(2):
        contract.gradients(engine, engine.shard_data(tiny.uneven_batch(seed=step)))
        token = engine.guard_before_step()
        engine.optimizer_step(), engine.lr_scheduler_step()
        found.append(engine.guard_after_step(token))
    assert found[0] == [Problem(FaultKind.WAITS, name) for name in sorted(shape.a_name for shape in shapes.values())], (
        found[0]
    )
    assert found[1] == [], found[1]


def an_a_that_has_no_excuse_is_found(config: RoleConfig) -> None:
    """A zero gradient of an A whose B is not zero is a fault, as it is for any parameter."""
    engine = make_engine(config, random_adapter(config.model.path, config.model.lora))
    contract.gradients(engine, engine.shard_data(tiny.uneven_batch()))
    name = next(name for name in engine.model.trained() if "lora_A" in name)
    engine.model.trained()[name].grad.to_local().zero_()
    token = engine.guard_before_step()
    engine.optimizer_step()
    assert engine.guard_after_step(token) == [Problem(FaultKind.ZERO_GRADIENT, name)]


def only_adapters_are_held(config: RoleConfig, path: str) -> dict[str, Any]:
    """The optimizer's and the checkpoint's elements against the adapters'; bytes of the checkpoint."""
    engine = make_engine(config)
    contract.train(engine, 1)
    saved = engine.save_checkpoint(path, global_step=1)
    adapter = sum(t.numel() for _, t in engine.adapter_weights())
    held = engine.max_over_ranks(sum(m.numel() for m in engine.optimizer.moments().values()))[0]
    size = sum(os.path.getsize(os.path.join(saved, file)) for file in os.listdir(saved))
    base = sum(p.numel() for p in engine.model.parameters().values())
    bits = {str(p.dtype) for p in engine.model.parameters().values()}
    stored = dcp.FileSystemReader(saved).read_metadata().state_dict_metadata.values()
    elements = sum(tensor.size.numel() for tensor in stored)
    return {"adapter": adapter, "moments": int(held), "saved": elements, "bytes": size, "base": base, "dtypes": bits}


def save_two_steps(config: RoleConfig, path: str) -> dict[str, Tensor]:
    engine = make_engine(config)
    contract.train(engine, 2)
    engine.save_checkpoint(path, global_step=2)
    return dict(engine.adapter_weights())


def goes_on(config: RoleConfig, path: str, expected: dict[str, Tensor]) -> list[tuple]:
    """Reads what another world size saved: the same adapters to the bit. Returns the history of 2 more steps."""
    engine = make_engine(config)
    engine.load_checkpoint(path)
    found = dict(engine.adapter_weights())
    if engine.is_main:
        contract.assert_equal(found, expected)
    return contract.train(engine, 2, first=2)


def save_whole(config: RoleConfig, path: str) -> None:
    engine = make_engine(config)
    contract.train(engine, 1)
    engine.save_checkpoint(path, global_step=1)


def export_loads_in_peft(config: RoleConfig, path: str) -> None:
    """The adapter folder and the merged folder give, in plain peft and transformers, the engine's own predictions."""
    engine = make_engine(config, random_adapter(config.model.path, config.model.lora, config.head))
    batch = tiny.uneven_batch()
    mine = predictions_of_engine(engine, batch)
    adapter, merged = os.path.join(path, "adapter"), os.path.join(path, "merged")
    engine.export_hf(adapter)
    engine.export_hf(merged, merged=True)
    if not engine.is_main:
        return
    by_peft = peft_model(config.model.path, adapter, config.head).get_base_model()
    assert any(isinstance(module, LoraLayer) for module in by_peft.modules())
    whole = HEADS[config.head].from_pretrained(merged, dtype=torch.float32, attn_implementation="eager")
    for model in (by_peft, whole):
        assert (tiny.hf_loss(model, batch, config.head)[1] - mine).abs().max() < LOG_PROB
    assert_merged(
        load_file(os.path.join(merged, "model.safetensors")), merged_by_peft(config.model.path, adapter, config.head)
    )
    assert sorted(os.listdir(adapter)) == ["adapter_config.json", "adapter_model.safetensors"]


def generates_with_adapters(config: RoleConfig) -> list[list[int]]:
    """Completions have the log-probs that a forward gives them; with adapters off they are those of the base. Returns their tokens."""
    engine = make_engine(config, random_adapter(config.model.path, config.model.lora))
    key, prompts = SamplingKey(3, 1, 0, 0), [[5, 9, 30, 4], [77], [8, 12, 13, 14, 15, 16, 17]]
    requests = [GenerateRequest(p, 5 + i, (), SamplingParams(1.0), key) for i, p in enumerate(prompts)]
    plain = make_engine(dataclasses.replace(config, model=dataclasses.replace(config.model, lora=None)))
    of_base = plain.generate(requests)
    with engine.without_adapters():
        assert engine.generate(requests) == of_base
    completions = engine.generate(requests)
    assert completions != of_base
    rows = [[*prompt, *c.tokens] for prompt, c in zip(prompts, completions, strict=True)]
    masks = [[0.0] * len(prompt) + [1.0] * len(c.tokens) for prompt, c in zip(prompts, completions, strict=True)]
    batch = make_batch(rows, masks)
    scored = predictions_of_engine(engine, batch)[batch.loss_mask.bool()]
    torch.testing.assert_close(torch.tensor([x for c in completions for x in c.log_probs]), scored, rtol=0, atol=2e-5)
    return [c.tokens for c in completions]


def only_its_own_scale_is_loaded(config: RoleConfig, right: str, wrong: dict[str, str]) -> None:
    """The adapter in the folder `right` is loaded, to the bit. wrong: folders of the same shapes by what is said of them."""
    engine = make_engine(config)
    before = dict(engine.adapter_weights())
    for says, path in wrong.items():
        try:
            engine.load_adapter(path)
        except ModelError as error:
            assert says in str(error) and "\n" not in str(error), (says, str(error))
        else:
            raise AssertionError(f"{says}: it was loaded")
        contract.assert_equal(dict(engine.adapter_weights()), before)
    engine.load_adapter(right)
    found = dict(engine.adapter_weights())
    if engine.is_main:
        contract.assert_equal(found, read_adapter(right)[1])


def dropout_trains_and_evaluates_without(config: RoleConfig) -> None:
    """Trap 18: dropout of adapters is on in training and off in evaluation."""
    tensors = random_adapter(config.model.path, config.model.lora)
    engine = make_engine(config, tensors)
    without = dataclasses.replace(config.model.lora, dropout=0.0)
    exact = make_engine(dataclasses.replace(config, model=dataclasses.replace(config.model, lora=without)), tensors)
    share = engine.shard_data(tiny.uneven_batch())

    def losses(engine: BaseEngine) -> list[float]:
        with engine.eval_mode():
            evaluated = engine.forward_backward_step(share, forward_only=True)[1]["loss"]
        with engine.train_mode():
            return [evaluated, *(engine.forward_backward_step(share)[1] for _ in range(2))]

    noisy, plain = losses(engine), losses(exact)
    assert noisy[0] == plain[0] == plain[1] == plain[2]
    assert len(set(noisy)) == 3, noisy


def save_and_export(config: RoleConfig, path: str) -> None:
    """A checkpoint in `path/checkpoints`, and both exports of the same adapters, with values of their own."""
    engine = make_engine(config, random_adapter(config.model.path, config.model.lora, config.head))
    engine.save_checkpoint(os.path.join(path, "checkpoints"), global_step=1)
    engine.export_hf(os.path.join(path, "merged"), merged=True)
    engine.export_adapter(os.path.join(path, "adapter"))
