"""The engine contract as cases that any backend runs through: functions for worlds of processes (see harness.py).

Each takes a config and works on every rank; what it asserts names the clause of mrl/engine/base.py. `loss_fn` is the
sum of masked negative log-probs; batches are uneven, with masks that have holes and a sequence that trains nowhere.
"""

from __future__ import annotations

import dataclasses
import math
import os
import random
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from mrl.batch import Batch, make_batch
from mrl.config.schema import RoleConfig
from mrl.engine import guards
from mrl.engine.base import BaseEngine, GenerateRequest
from mrl.engine.guards import FaultKind, Problem
from mrl.engine.registry import build_engine
from mrl.engine.schedule import learning_rate
from mrl.errors import CheckpointError
from tests.engine import tiny

PAD = int(tiny.uneven_batch().tokens[0])


def loss_fn(data: Batch, predictions: dict[str, Tensor], ctx: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    ctx["metrics"]["trained"] = data.loss_mask.sum()
    ctx["metrics"]["log_probs"] = (predictions["log_probs"].detach() * data.loss_mask).sum()
    return -(predictions["log_probs"] * data.loss_mask).sum(), ctx


def make_engine(config: RoleConfig) -> BaseEngine:
    engine = build_engine(config)
    engine.init_model()
    engine.set_loss_fn(loss_fn)
    return engine


def gradients(engine: BaseEngine, *batches: Batch, **options: Any) -> tuple[list, dict[str, Tensor]]:
    """(results of a forward_backward_step for each batch, the gradients they leave together; {} off rank 0)."""
    engine.optimizer_zero_grad()
    with engine.train_mode():
        results = [engine.forward_backward_step(batch, **options) for batch in batches]
    return results, dict(engine.hf_gradients())


def train(engine: BaseEngine, steps: int, *, first: int = 0) -> list[tuple]:
    """`steps` optimizer steps on batches that are a function of the step. Returns (loss, grad norm, LR, metrics) of each."""
    history = []
    for step in range(first, first + steps):
        share = engine.shard_data(tiny.uneven_batch(seed=step))
        engine.optimizer_zero_grad()
        with engine.train_mode():
            _, loss, ctx = engine.forward_backward_step(share)
        norm = engine.optimizer_step()
        assert norm.skipped is None
        history.append((loss, float(norm), engine.lr_scheduler_step(), ctx["metrics"]))
    return history


def numbers_of_step(engine: BaseEngine, batch: Batch, ctx: dict[str, Any] | None = None) -> dict[str, Tensor]:
    """Makes an optimizer step. Returns its loss, metrics and predictions, the gradients, their norm, and the weights."""
    engine.optimizer_zero_grad()
    with engine.train_mode():
        predictions, loss, ctx = engine.forward_backward_step(engine.shard_data(batch), ctx)
    gradients = {f"gradient of {name}": t.clone() for name, t in engine.hf_gradients()}
    plain = {"loss": loss, "norm": float(engine.optimizer_step()), "rate": engine.lr_scheduler_step()}
    plain |= {f"metric {name}": value for name, value in ctx["metrics"].items()}
    found = {name: torch.tensor(value, dtype=torch.float64) for name, value in plain.items()} | gradients
    found |= {f"predicted {name}": value for name, value in predictions.items()}
    return found | {f"weight {name}": t.clone() for name, t in engine.hf_weights()}


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    assert actual.keys() == expected.keys(), sorted(actual.keys() ^ expected.keys())
    errors = {name: tiny.relative_l2(actual[name], expected[name]) for name in expected}
    bad = {name: error for name, error in errors.items() if not error <= bound}
    assert not bad, bad


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys(), sorted(actual.keys() ^ expected.keys())
    different = [name for name in expected if not torch.equal(actual[name], expected[name])]
    assert not different, different


def everyone(value: Any) -> list[Any]:
    """`value` of each rank, in order."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# -- a mini-batch ------------------------------------------------------------------------------------------------------


def micro_batches_do_not_matter(config: RoleConfig) -> None:
    """Trap 5: loss, metrics and gradients are those of the global mini-batch however it is cut; so are padding and packing."""
    batch = tiny.uneven_batch()
    expected = None
    for packing, cut in ((True, {"size": 9}), (True, {"size": 1}), (True, {"tokens": 32}), (False, {"size": 2})):
        micro_batch = dataclasses.replace(config.engine.micro_batch, **{"size": None, "tokens": None, **cut})
        cut_engine = dataclasses.replace(config.engine, micro_batch=micro_batch)
        engine = make_engine(dataclasses.replace(config, engine=cut_engine, packing=packing))
        ((_, loss, ctx),), of_cut = gradients(engine, engine.shard_data(batch))
        assert ctx["metrics"]["trained"] == 1.0
        assert abs(ctx["metrics"]["log_probs"] + loss) < 1e-6
        if expected is None:
            expected = (loss, of_cut)
        assert abs(loss - expected[0]) < 1e-6 * loss
        assert_close(of_cut, expected[1], 1e-5)


def gradients_accumulate_until_zeroed(config: RoleConfig) -> None:
    """Trap 28: two calls on halves leave the gradients of one call on the whole; zero_grad forgets."""
    engine = make_engine(config)
    batch = tiny.uneven_batch(sequences=10)
    halves = [engine.shard_data(batch.select(range(start, 10, 2))) for start in (0, 1)]
    parts, accumulated = gradients(engine, *halves)
    ((_, loss, _),), whole = gradients(engine, engine.shard_data(batch))
    assert abs(sum(part[1] for part in parts) - loss) < 1e-6 * loss
    assert_close(accumulated, whole, 1e-5)
    _, again = gradients(engine, engine.shard_data(batch))
    assert_equal(again, whole)


def the_pad_token_trains_like_any_other(config: RoleConfig) -> None:
    """A model whose `pad_token_id` is a token of the data (as an end-of-turn token often is): its row has a gradient."""
    engine = make_engine(config)
    batch = tiny.uneven_batch()
    assert (batch.tokens == PAD).any()
    _, found = gradients(engine, engine.shard_data(batch))
    rows = found.get("model.embed_tokens.weight")
    assert not engine.is_main or (rows[PAD] != 0).any()


def predictions_come_back_in_order(config: RoleConfig) -> None:
    """Predictions are in the batch's order; shard_data and unshard_data are inverses; a share may be empty (trap 8)."""
    engine = make_engine(config)
    with engine.eval_mode():
        for sequences in (9, 2):
            batch = tiny.uneven_batch().select(range(sequences)).with_denominators()
            share = engine.shard_data(batch)
            assert dict(share.denominators) == dict(batch.denominators)
            identity = engine.unshard_data({"tokens": share.tokens.to(engine.device)}, batch)
            assert torch.equal(identity["tokens"].cpu(), batch.tokens)
            shared, ctx = engine.forward_backward_step(share, forward_only=True)
            assert shared["log_probs"].shape == share.tokens.shape and not shared["log_probs"].requires_grad
            whole = engine.unshard_data(shared, batch)["log_probs"].cpu()
            for i in range(sequences):  # alone on every rank: no other sequence, no packing
                alone, _ = engine.forward_backward_step(batch.select([i]), forward_only=True)
                start, stop = batch.cu_seqlens[i], batch.cu_seqlens[i + 1]
                torch.testing.assert_close(alone["log_probs"].cpu(), whole[start:stop], rtol=0, atol=1e-5)
            mean = -(whole * batch.loss_mask).sum() / batch.denominators["tokens"]
            assert abs(ctx["loss"] - float(mean)) < 1e-5


def documents_do_not_see_each_other(config: RoleConfig) -> None:
    """In a packed micro-batch, another document's tokens change nothing of a document's log-probs, bit for bit."""
    micro_batch = dataclasses.replace(config.engine.micro_batch, size=None, tokens=256)
    engine = make_engine(
        dataclasses.replace(config, packing=True, engine=dataclasses.replace(config.engine, micro_batch=micro_batch))
    )
    batch = tiny.uneven_batch(lengths=(70, 1, 66, 12))  # one micro-batch; more than a chunk of gated delta nets
    # log-probs are 0 where nothing trains
    batch = dataclasses.replace(batch, loss_mask=torch.ones_like(batch.loss_mask))
    tokens = batch.tokens.clone()
    tokens[: int(batch.lengths[0])] = tokens[: int(batch.lengths[0])].flip(0)
    edited = dataclasses.replace(batch, tokens=tokens)
    with engine.eval_mode():
        before, _ = engine.forward_backward_step(batch, forward_only=True)
        after, _ = engine.forward_backward_step(edited, forward_only=True)
    first = int(batch.lengths[0])
    assert not torch.equal(before["log_probs"][:first], after["log_probs"][:first])
    assert torch.equal(before["log_probs"][first:], after["log_probs"][first:])


def hooks_own_their_micro_batch(config: RoleConfig) -> None:
    """preprocess and postprocess run per micro-batch; what they do to ctx is seen in it and in no other."""
    engine = make_engine(config)
    seen = []

    def before(data: Batch, ctx: dict) -> tuple[Batch, dict]:
        assert "mark" not in ctx and ctx["kept"] == 1
        ctx["mark"] = data.num_sequences
        return data, ctx

    def after(data: Batch, predictions: dict, ctx: dict) -> tuple[dict, dict]:
        seen.append(ctx["mark"])
        return predictions | {"twice": 2 * predictions["log_probs"]}, ctx

    share = engine.shard_data(tiny.uneven_batch())
    given = {"kept": 1, "temperature": 1.0}
    with engine.train_mode():
        predictions, _, ctx = engine.forward_backward_step(share, given, preprocess_fn=before, postprocess_fn=after)
    assert torch.equal(predictions["twice"], 2 * predictions["log_probs"])
    assert given == {"kept": 1, "temperature": 1.0} and ctx["kept"] == 1 and "mark" not in ctx
    if seen:  # pipeline stages other than the last see no predictions
        assert sum(seen) == share.num_sequences


def temperature_and_entropy(config: RoleConfig, model_folder: str) -> None:
    """Trap 19: log-probs are those of logits / temperature; entropy comes when asked for."""
    engine = make_engine(config)
    batch = tiny.uneven_batch(sequences=3)
    hf = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    with engine.eval_mode():
        ctx = {"temperature": 0.7, "entropy": "detached"}
        predictions, _ = engine.forward_backward_step(batch, ctx, forward_only=True)
    expected_log_probs, expected_entropies = [], []
    for tokens, labels in zip(*(t.split(batch.lengths.tolist()) for t in (batch.tokens, batch.labels)), strict=True):
        log_p = torch.log_softmax(hf(input_ids=tokens[None]).logits[0] / 0.7, -1).detach()
        expected_log_probs.append(log_p.gather(1, labels[:, None])[:, 0])
        expected_entropies.append(-(log_p.exp() * log_p).sum(1))
    close, trains = {"rtol": 0, "atol": 2e-5}, batch.loss_mask != 0
    assert 0 < trains.sum() < trains.numel(), "some labels train, others are 0"
    torch.testing.assert_close(predictions["log_probs"].cpu(), torch.cat(expected_log_probs) * trains, **close)
    torch.testing.assert_close(predictions["entropy"].cpu(), torch.cat(expected_entropies) * trains, **close)


def dropout_is_off_in_eval_mode(config: RoleConfig) -> None:
    """Trap 18: log-probs in eval mode are those of the model without dropout; in train mode dropout is on."""
    engine = make_engine(config)
    share = engine.shard_data(tiny.uneven_batch())
    losses = []
    for mode in (engine.eval_mode, engine.train_mode, engine.eval_mode):
        with mode():
            losses.append(engine.forward_backward_step(share, forward_only=True)[1]["loss"])
    assert losses[0] == losses[2] and abs(losses[1] - losses[0]) > 1e-3, losses


# -- the optimizer -----------------------------------------------------------------------------------------------------


def schedule_and_clipping(config: RoleConfig) -> None:
    """Trap 23: the rate of each step is the schedule's; clipping changes the update and not the reported norm."""
    engine = make_engine(config)
    expected = [learning_rate(s, optimizer=config.optimizer, total_steps=config.total_steps) for s in range(3)]
    history = train(engine, 3)
    assert [lr for _, _, lr, _ in history] == expected
    unclipped = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, clip_grad=0.0))
    (_, norm, _, _), *_ = train(make_engine(unclipped), 1)
    assert norm == history[0][1] > 1.0
    # an eps far above any gradient makes the first step lr / eps times the clipped gradient
    plain = dataclasses.replace(config.optimizer, lr=1e2, eps=1e3, weight_decay=0.0)
    engine = make_engine(dataclasses.replace(config, optimizer=plain))
    before = dict(engine.hf_weights())
    train(engine, 1)
    moved = sum(float((w.double() - before[name].double()).square().sum()) for name, w in engine.hf_weights()) ** 0.5
    assert not engine.is_main or abs(moved / (0.1 * plain.clip_grad) - 1) < 2e-3, moved


def a_step_that_is_not_finite_changes_nothing(config: RoleConfig) -> None:
    engine = make_engine(config)

    def broken(data: Batch, predictions: dict, ctx: dict):
        loss, ctx = loss_fn(data, predictions, ctx)
        return loss * torch.inf, ctx

    train(engine, 1)
    before = {name: t.clone() for name, t in engine.hf_weights()}
    engine.set_loss_fn(broken)
    gradients(engine, engine.shard_data(tiny.uneven_batch()))
    norm = engine.optimizer_step()
    assert norm.skipped and not math.isfinite(norm), (norm, norm.skipped)
    assert_equal(dict(engine.hf_weights()), before)
    engine.set_loss_fn(loss_fn)
    train(engine, 1, first=1)
    assert all(t.isfinite().all() for _, t in engine.hf_weights())


def guards_find_nothing_on_a_right_step(config: RoleConfig) -> None:
    engine = make_engine(config)
    gradients(engine, engine.shard_data(tiny.uneven_batch()))
    token = engine.guard_before_step()
    engine.optimizer_step()
    assert engine.guard_after_step(token) == []


def guards_find_a_step_that_was_not_made(config: RoleConfig) -> None:
    engine = make_engine(config)
    gradients(engine, engine.shard_data(tiny.uneven_batch()))
    problems = engine.guard_after_step(engine.guard_before_step())
    assert len(problems) > 10 and all(problem.kind is FaultKind.UNCHANGED for problem in problems)


def guards_find_copies_that_differ(config: RoleConfig) -> None:
    """HSDP: what one rank has otherwise than those with the same shards is named on every rank."""
    engine = make_engine(config)
    gradients(engine, engine.shard_data(tiny.uneven_batch()))
    token = engine.guard_before_step()
    engine.optimizer_step()
    name, parameter = list(engine.model.parameters().items())[3]
    if dist.get_rank() == 0:
        parameter.detach().to_local().view(-1)[0] += 1
    assert engine.guard_after_step(token) == [Problem(FaultKind.REPLICAS_DIFFER, name, "ranks [0, 2]")]


def offloaded_state_gives_the_same_numbers(config: RoleConfig) -> None:
    kept = make_engine(config)
    history = train(kept, 2)
    kinds = ("parameters", "gradients", "optimizer")
    engine = make_engine(dataclasses.replace(config, engine=dataclasses.replace(config.engine, offload=kinds)))
    assert train(engine, 1) == history[:1]
    for model, optimizer in ((True, False), (False, True), (True, True)):
        engine.to("host", model=model, optimizer=optimizer)
        engine.to("device", model=model, optimizer=optimizer)
    engine.to("host")
    assert train(engine, 1, first=1) == history[1:]
    assert_equal(dict(engine.hf_weights()), dict(kept.hf_weights()))


def bf16_keeps_fp32_masters(config: RoleConfig) -> None:
    """Trap 30: gradients of a bfloat16 model are reduced and accumulated in fp32, and small updates are not lost."""
    small = dataclasses.replace(config.optimizer, lr=1e-3, min_lr=1e-3)
    model = dataclasses.replace(config.model, dtype="bfloat16")
    engine = make_engine(dataclasses.replace(config, model=model, optimizer=small))
    exact = make_engine(dataclasses.replace(config, optimizer=small))
    ((_, loss, _),), of_bf16 = gradients(engine, engine.shard_data(tiny.uneven_batch()))
    ((_, expected, _),), of_fp32 = gradients(exact, exact.shard_data(tiny.uneven_batch()))
    assert abs(loss / expected - 1) < 0.02
    assert all(t.dtype == torch.float32 for t in of_bf16.values())
    assert any(not torch.equal(t, t.bfloat16().float()) for t in of_bf16.values()) or not of_bf16
    assert_close(of_bf16, of_fp32, 0.2)
    before = dict(engine.hf_weights())
    assert all(t.dtype == torch.bfloat16 for t in before.values())
    for step in range(15):  # one update is lost in the rounding of a bfloat16 norm weight; fifteen are not
        train(engine, 1, first=step)
    after = dict(engine.hf_weights())
    assert all((after[name] != before[name]).any() for name in after)


def weights_are_those_of(config: RoleConfig, other: str) -> None:
    """What is read from the model folder is the model of the folder `other`, bit for bit."""
    read = [
        dict(make_engine(c).hf_weights())
        for c in (config, dataclasses.replace(config, model=dataclasses.replace(config.model, path=other)))
    ]
    assert_equal(*read)


def value_head_export_is_a_sequence_classifier(config: RoleConfig, path: str) -> None:
    """Trap 12: what a value head exports says that it is no language model and ties nothing; transformers loads it."""
    engine = make_engine(config)
    engine.export_hf(path)
    if not engine.is_main:
        return
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    assert model.config.num_labels == 1 and not model.config.tie_word_embeddings
    saved = load_file(os.path.join(path, "model.safetensors"))
    assert_equal({name: tensor for name, tensor in model.state_dict().items() if name in saved}, saved)


# -- checkpoints and weights -------------------------------------------------------------------------------------------


def resume_is_bitwise(config: RoleConfig, path: str) -> None:
    """A run of 5 steps, and one of 2 that is saved, read by a new engine and goes on for 3, are equal in every bit."""
    whole = make_engine(config)
    expected = train(whole, 5)
    first = make_engine(config)
    train(first, 2)
    saved = first.save_checkpoint(path, global_step=2, state={"seen": 18, "names": ["a"]})
    assert os.path.basename(saved) == "step_00000002"
    train(first, 1, first=2)  # saving leaves the engine as it was
    second = make_engine(config)
    train(second, 1, first=7)  # what it did before does not matter
    assert second.load_checkpoint(path) == {"seen": 18, "names": ["a"]}
    assert train(second, 3, first=2) == expected[2:]
    assert_equal(dict(second.hf_weights()), dict(whole.hf_weights()))
    if config.model.lora is not None:
        assert_equal(dict(second.adapter_weights()), dict(whole.adapter_weights()))


def random_numbers_go_on(config: RoleConfig, path: str) -> None:
    """What each rank draws after a save, it draws again after a load, whatever is drawn elsewhere in the process."""
    engine = make_engine(config)
    saved = engine.save_checkpoint(path, global_step=3)
    with engine.generators.installed():
        drawn = torch.rand(3)
    torch.manual_seed(10), random.seed(10)
    engine.load_checkpoint(saved)
    with engine.generators.installed():
        assert torch.equal(torch.rand(3), drawn)
    assert len({tuple(numbers) for numbers in everyone(drawn.tolist())}) == dist.get_world_size()


def save_after(config: RoleConfig, path: str, remote: str | None = None) -> list[tuple]:
    """Two steps, a save, two steps more. Returns the history of the latter."""
    engine = make_engine(config)
    train(engine, 2)
    engine.save_checkpoint(path, remote, global_step=2, max_ckpt_to_keep=1, state={"step": 2})
    return train(engine, 2, first=2)


def go_on(config: RoleConfig, path: str, expected: list[tuple], remote: str | None = None, **options: Any) -> None:
    """Another layout reads that checkpoint and goes on within rounding."""
    engine = make_engine(config)
    assert engine.load_checkpoint(path, remote, **options) == {"step": 2}
    for (loss, norm, lr, _), (a, b, c, _) in zip(train(engine, 2, first=2), expected, strict=True):
        assert abs(loss / a - 1) < 1e-5 and abs(norm / b - 1) < 1e-4 and lr == c


def refuses_checkpoint(config: RoleConfig, path: str, message: str) -> None:
    """A checkpoint that is not right is refused on every rank, and the engine is as it was."""
    engine = make_engine(config)
    before = {name: t.clone() for name, t in engine.hf_weights()}
    try:
        engine.load_checkpoint(path)
    except CheckpointError as error:
        assert message in str(error) and "\n" not in str(error), error
    else:
        raise AssertionError(f"{path} was loaded")
    assert_equal(dict(engine.hf_weights()), before)


def export_is_what_was_trained(config: RoleConfig, path: str) -> None:
    """transformers loads the exported folder; its logits and tensors are the engine's."""
    engine = make_engine(config)
    train(engine, 1)
    engine.export_hf(path)
    weights = dict(engine.hf_weights())
    everywhere = [(name, guards.checksum(tensor)) for name, tensor in engine.hf_weights(everywhere=True)]
    assert everywhere == engine.on_main(lambda: [(name, guards.checksum(tensor)) for name, tensor in weights.items()])
    if engine.is_main:
        files = {}
        for file in tiny.tensor_files(path):
            files |= load_file(file)
        assert_equal(files, weights)
    dist.barrier()
    batch = tiny.uneven_batch(sequences=4)
    with engine.eval_mode():
        predictions, _ = engine.forward_backward_step(batch, forward_only=True)
    hf = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for i, log_probs in enumerate(predictions["log_probs"].cpu().split(batch.lengths.tolist())):
        one = batch.select([i])
        log_p = torch.log_softmax(hf(input_ids=one.tokens[None]).logits[0], -1)
        expected = log_p.gather(1, one.labels[:, None])[:, 0] * (one.loss_mask != 0)
        torch.testing.assert_close(expected, log_probs, rtol=0, atol=2e-5)


def random_start(config: RoleConfig) -> dict[str, int] | None:
    """A checksum of each tensor of a model from scratch, every bit in its place: the same in every layout."""
    engine = make_engine(dataclasses.replace(config, model=dataclasses.replace(config.model, init="random")))
    sums = {name: guards.checksum(t) for name, t in engine.hf_weights()}
    return sums if engine.is_main else None


# -- generation --------------------------------------------------------------------------------------------------------


def generates_as_hugging_face(config: RoleConfig, model_folder: str) -> None:
    """Greedy completions with stop tokens and limits, the same on every rank, with the log-probs of a forward pass."""
    engine = make_engine(config)
    batch = tiny.uneven_batch(sequences=5)
    prompts = [row.tolist() for row in batch.tokens.split(batch.lengths.tolist())]
    hf = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    requests, expected = [], []
    for i, prompt in enumerate(prompts):
        tokens = list(prompt)
        for _ in range(4 + i):
            tokens.append(int(hf(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
        new = tokens[len(prompt) :]
        stop = new[2] if i == 1 else None
        cut = new[: new.index(stop) + 1] if stop is not None else new
        requests.append(GenerateRequest(prompt, 4 + i, () if stop is None else (stop,)))
        expected.append((cut, stop is not None))
    completions = engine.generate(requests)
    assert [(c.tokens, c.finished) for c in completions] == expected
    batch = make_batch([p + c.tokens for p, c in zip(prompts, completions, strict=True)],
                       [[0.0] * len(p) + [1.0] * len(c.tokens) for p, c in zip(prompts, completions, strict=True)])  # fmt: skip
    with engine.eval_mode():
        predictions, _ = engine.forward_backward_step(batch, forward_only=True)
    scored = predictions["log_probs"].cpu()[batch.loss_mask.bool()]
    torch.testing.assert_close(torch.tensor([x for c in completions for x in c.log_probs]), scored, rtol=0, atol=2e-5)
    assert all(other == completions for other in everyone(completions))
    assert engine.generate([]) == []
