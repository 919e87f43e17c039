"""LoRA on any engine, against PEFT on plain Hugging Face: functions for worlds of processes (see harness.py).

The reference is a `peft.PeftModel` in fp32 on one process, one sequence at a time, loaded from a folder that
`mrl.engine.lora.folder.write_adapter` wrote with random A *and* random non-zero B (with B = 0, A would have no gradient, and a wrong
scale would not show). Nothing of what is compared is computed by mrl there.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import peft
import torch
import torch.distributed.checkpoint as dcp
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor

from mrl.algorithms.sft import sft_loss
from mrl.batch import Batch
from mrl.check.reference import file_names
from mrl.config.schema import LoraConfig, RoleConfig
from mrl.engine.base import BaseEngine, GenerateRequest
from mrl.engine.guards import FaultKind, Problem
from mrl.engine.lora.folder import adapters, read_adapter, write_adapter
from mrl.engine.lora.shapes import SCORE, adapter_shapes, initial_a
from mrl.engine.registry import build_engine
from mrl.errors import CheckpointError, ModelError
from tests.engine import contract, tiny
from tests.engine.tiny import HEADS

LOSS, GRADIENT, UPDATE, LOG_PROB = 1e-6, 1e-5, 1e-3, 1e-5


@dataclasses.dataclass(frozen=True)
class Reference:
    """What PEFT computes. loss: token mean. log_probs: [T], or values. gradients, updated: by name in the adapter's file, of the
    first step and after `tiny.STEPS` steps of AdamW. merged: what `merge_and_unload` makes of the start, by name in files."""

    start: dict[str, Tensor]
    loss: float
    log_probs: Tensor
    gradients: dict[str, Tensor]
    updated: dict[str, Tensor]
    merged: dict[str, Tensor]


def random_adapter(folder: str, lora: LoraConfig, head: str = "lm", seed: int = 1) -> dict[str, Tensor]:
    """Every tensor of an adapter's file: A as at the start, B and the score random."""
    shapes = adapters(folder, lora, head)
    generator = torch.Generator().manual_seed(seed)
    named = adapter_shapes(shapes, head, hidden_size=32)
    made = {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in named.items()}
    return made | {shape.a_name: initial_a(shape, seed=0) for shape in shapes.values()}


def peft_model(folder: str, adapter: str, head: str = "lm", *, trainable: bool = False) -> peft.PeftModel:
    """What a user of peft loads."""
    base = HEADS[head].from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return peft.PeftModel.from_pretrained(base, adapter, is_trainable=trainable)


def reference(folder: str, lora: LoraConfig, batch: Batch, path: str, head: str = "lm") -> Reference:
    """PEFT's numbers. path: an empty folder."""
    write_adapter(path, lora, folder, random_adapter(folder, lora, head).items(), head=head)
    start = read_adapter(path)[1]
    model = peft_model(folder, path, head, trainable=True)
    parameters = {
        (SCORE if "modules_to_save" in name else name.replace(".default.", ".")): p
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    assert parameters.keys() == start.keys(), sorted(parameters.keys() ^ start.keys())
    settings = tiny.OPTIMIZER
    adamw = torch.optim.AdamW(
        parameters.values(), lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
    )
    for step in range(tiny.STEPS):
        adamw.zero_grad()
        loss, log_probs = tiny.hf_loss(model.get_base_model(), batch, head)
        if step == 0:
            first = loss, log_probs, {name: p.grad.clone() for name, p in parameters.items()}
        torch.nn.utils.clip_grad_norm_(parameters.values(), settings.clip_grad)
        adamw.param_groups[0]["lr"] = settings.lr + (settings.min_lr - settings.lr) * step / 10
        adamw.step()
    updated = {name: p.detach().clone() for name, p in parameters.items()}
    whole = peft_model(folder, path, head).merge_and_unload()
    merged = file_names(whole, {name: p.detach() for name, p in whole.named_parameters()})
    return Reference(start, *first, updated, merged)


# -- in a world of processes -------------------------------------------------------------------------------------------


def make_engine(config: RoleConfig, tensors: Mapping[str, Tensor] | None = None) -> BaseEngine:
    engine = build_engine(config)
    engine.init_model()
    engine.set_loss_fn(sft_loss if config.head == "lm" else tiny.value_loss)
    if tensors is not None:
        engine.set_adapters(tensors)
    return engine


def equals_peft(config: RoleConfig, expected: Reference, batch: Batch) -> None:
    """Loss, log-probs, the gradient of every adapter tensor, three updates, and the merged weights."""
    engine = make_engine(config, expected.start)
    merged = dict(engine.hf_weights())
    name = "log_probs" if config.head == "lm" else "values"
    share, losses = engine.shard_data(batch), []
    for step in range(tiny.STEPS):
        engine.optimizer_zero_grad()
        with engine.train_mode():
            predictions, loss, _ = engine.forward_backward_step(share)
        losses.append(loss)
        if step == 0:
            log_probs = engine.unshard_data({name: predictions[name]}, batch)[name]
            gradients = dict(engine.hf_gradients())
        engine.optimizer_step(), engine.lr_scheduler_step()
    updated = dict(engine.adapter_weights())
    if not engine.is_main:
        assert not updated and not gradients and not merged
        return
    assert abs(losses[0] - expected.loss) / expected.loss < LOSS, (losses[0], expected.loss)
    assert (log_probs.cpu() - expected.log_probs).abs().max() < LOG_PROB
    contract.assert_close(gradients, expected.gradients, GRADIENT)
    moves = [{n: t[n].double() - expected.start[n] for n in expected.start} for t in (updated, expected.updated)]
    contract.assert_close(*moves, UPDATE)
    buffers = {name for name in merged if name.endswith("e_score_correction_bias")}  # no parameters, there
    merged = {name: tensor for name, tensor in merged.items() if name not in buffers}
    contract.assert_close(merged, {name: expected.merged[name] for name in merged}, 1e-6)
    assert set(expected.merged) - set(merged) <= {"lm_head.weight"}  # tied


def starts_as_the_base(config: RoleConfig) -> None:
    """B = 0: to the bit the model without adapters. Switched off, adapters of any values change nothing either."""
    plain = make_engine(dataclasses.replace(config, model=dataclasses.replace(config.model, lora=None)))
    share = plain.shard_data(tiny.uneven_batch())
    name = "log_probs" if config.head == "lm" else "values"

    def predict(engine: BaseEngine) -> Tensor:
        with engine.eval_mode():
            return engine.forward_backward_step(share, forward_only=True)[0][name]

    base, engine = predict(plain), make_engine(config)
    assert torch.equal(predict(engine), base)
    contract.assert_equal(dict(engine.hf_weights()), dict(plain.hf_weights()))
    engine.set_adapters(random_adapter(config.model.path, config.model.lora, config.head))
    assert not torch.equal(predict(engine), base)
    if config.head == "lm":
        with engine.without_adapters():
            assert torch.equal(predict(engine), base)
        assert not torch.equal(predict(engine), base)


def first_steps_are_guarded(config: RoleConfig) -> None:
    """A waits for B in the first step, which is said of each A and of nothing else; then everything trains."""
    engine = make_engine(config)
    shapes = adapters(config.model.path, config.model.lora, config.head)
    found = []
    for step in range(2):
        engine.optimizer_zero_grad()
        with engine.train_mode():
            engine.forward_backward_step(engine.shard_data(tiny.uneven_batch(seed=step)))
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
    engine.optimizer_zero_grad()
    with engine.train_mode():
        engine.forward_backward_step(engine.shard_data(tiny.uneven_batch()))
    name = next(name for name in engine.model.trained() if "lora_A" in name)
    engine.model.trained()[name].grad.to_local().zero_()
    token = engine.guard_before_step()
    engine.optimizer_step()
    assert engine.guard_after_step(token) == [Problem(FaultKind.ZERO_GRADIENT, name)]


def only_adapters_are_held(config: RoleConfig, path: str) -> dict[str, Any]:
    """The optimizer's and the checkpoint's elements against the adapters'; bytes of the checkpoint."""
    engine = make_engine(config)
    contract.train(with_loss(engine), 1)
    saved = engine.save_checkpoint(path, global_step=1)
    adapter = sum(t.numel() for _, t in engine.adapter_weights())
    held = engine.max_over_ranks(sum(m.numel() for m in engine.optimizer.moments().values()))[0]
    size = sum(os.path.getsize(os.path.join(saved, file)) for file in os.listdir(saved))
    base = sum(p.numel() for p in engine.model.parameters().values())
    bits = {str(p.dtype) for p in engine.model.parameters().values()}
    stored = dcp.FileSystemReader(saved).read_metadata().state_dict_metadata.values()
    elements = sum(tensor.size.numel() for tensor in stored)
    return {"adapter": adapter, "moments": int(held), "saved": elements, "bytes": size, "base": base, "dtypes": bits}


def with_loss(engine: BaseEngine) -> BaseEngine:
    engine.set_loss_fn(contract.loss_fn)
    return engine


def resume_is_bitwise(config: RoleConfig, path: str) -> None:
    """5 steps, and 2 that are saved, read and continued for 3, are equal in every bit; dropout goes on too."""
    whole = with_loss(make_engine(config))
    expected = contract.train(whole, 5)
    first = with_loss(make_engine(config))
    contract.train(first, 2)
    first.save_checkpoint(path, global_step=2, state={"seen": 18})
    second = with_loss(make_engine(config))
    contract.train(second, 1, first=7)
    assert second.load_checkpoint(path) == {"seen": 18}
    assert contract.train(second, 3, first=2) == expected[2:]
    contract.assert_equal(dict(second.adapter_weights()), dict(whole.adapter_weights()))


def save_two_steps(config: RoleConfig, path: str) -> dict[str, Tensor]:
    engine = with_loss(make_engine(config))
    contract.train(engine, 2)
    engine.save_checkpoint(path, global_step=2)
    return dict(engine.adapter_weights())


def goes_on(config: RoleConfig, path: str, expected: dict[str, Tensor]) -> list[tuple]:
    """Reads what another world size saved: the same adapters to the bit. Returns the history of 2 more steps."""
    engine = with_loss(make_engine(config))
    engine.load_checkpoint(path)
    found = dict(engine.adapter_weights())
    if engine.is_main:
        contract.assert_equal(found, expected)
    return contract.train(engine, 2, first=2)


def save_whole(config: RoleConfig, path: str) -> None:
    engine = with_loss(make_engine(config))
    contract.train(engine, 1)
    engine.save_checkpoint(path, global_step=1)


def refusal(config: RoleConfig, path: str) -> str:
    """What a checkpoint that is not this run's is refused with, before anything has changed."""
    engine = with_loss(make_engine(config))
    streamed = engine.adapter_weights if config.model.lora is not None else engine.hf_weights
    before = dict(streamed())
    try:
        engine.load_checkpoint(path)
    except CheckpointError as error:
        contract.assert_equal(dict(streamed()), before)
        return str(error)
    raise AssertionError("it was read")


def export_loads_in_peft(config: RoleConfig, path: str) -> None:
    """The adapter folder and the merged folder give, in plain peft and transformers, the engine's own predictions."""
    engine = make_engine(config, random_adapter(config.model.path, config.model.lora, config.head))
    batch = tiny.uneven_batch()
    name = "log_probs" if config.head == "lm" else "values"
    with engine.eval_mode():
        predictions, _ = engine.forward_backward_step(engine.shard_data(batch), forward_only=True)
    mine = engine.unshard_data({name: predictions[name]}, batch)[name].cpu()
    adapter, merged = os.path.join(path, "adapter"), os.path.join(path, "merged")
    engine.export_hf(adapter)
    engine.export_hf(merged, merged=True)
    if not engine.is_main:
        return
    with torch.no_grad():
        by_peft = peft_model(config.model.path, adapter, config.head)
        assert any(isinstance(module, LoraLayer) for module in by_peft.modules())
        whole = HEADS[config.head].from_pretrained(merged, dtype=torch.float32, attn_implementation="eager")
        found = [predictions_of(model, batch, config.head) for model in (by_peft.get_base_model(), whole)]
    assert (found[0] - mine).abs().max() < LOG_PROB
    assert (found[1] - mine).abs().max() < LOG_PROB
    assert sorted(os.listdir(adapter)) == ["adapter_config.json", "adapter_model.safetensors"]


def predictions_of(model: torch.nn.Module, batch: Batch, head: str) -> Tensor:
    """[T]: log-probs, 0 where the mask is 0, or values."""
    found = []
    for tokens, labels, mask in zip(
        *(t.split(batch.lengths.tolist()) for t in (batch.tokens, batch.labels, batch.loss_mask)), strict=True
    ):
        if head == "lm":
            log_probs = torch.log_softmax(model(input_ids=tokens[None]).logits[0].float(), -1)
            found.append(log_probs.gather(1, labels[:, None])[:, 0] * (mask != 0))
        else:
            found.append(model.score(model.model(input_ids=tokens[None]).last_hidden_state)[0, :, 0])
    return torch.cat(found)


def generates_with_adapters(config: RoleConfig) -> None:
    """Greedy completions are those of the merged model; with adapters off, those of the base."""
    lora = config.model.lora
    tensors = random_adapter(config.model.path, lora)
    engine = make_engine(config, tensors)
    requests = [GenerateRequest(tokens=[5, 9, 3 + i], max_new_tokens=6) for i in range(3)]
    plain = make_engine(dataclasses.replace(config, model=dataclasses.replace(config.model, lora=None)))
    of_base = [c.tokens for c in plain.generate(requests)]
    with engine.without_adapters():
        assert [c.tokens for c in engine.generate(requests)] == of_base
    mine = engine.generate(requests)
    assert [c.tokens for c in mine] != of_base
    merged = make_engine(dataclasses.replace(config, model=dataclasses.replace(config.model, lora=None)))
    streamed: list[Any] = [dict(engine.hf_weights())]
    torch.distributed.broadcast_object_list(streamed)
    merged.model._fill(merged.model.files.rows_by(streamed[0].__getitem__))
    others = merged.generate(requests)
    assert [c.tokens for c in mine] == [c.tokens for c in others]
    for a, b in zip(mine, others, strict=True):
        assert max(abs(x - y) for x, y in zip(a.log_probs, b.log_probs, strict=True)) < 1e-4


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
