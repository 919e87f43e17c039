"""The contract's cases of what `mrl serve` asks of an engine, run by test_contract.py: models that take turns, updates by call,
several labels of a token, the largest log-probs."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from mrl.batch import Batch
from mrl.config.schema import RoleConfig
from mrl.engine.base import BaseEngine
from mrl.engine.trained_state import UpdateSettings
from tests.engine import tiny
from tests.engine.contract import assert_close, assert_equal, gradients, loss_fn, make_engine

UPDATES = [UpdateSettings(lr, (0.8, b), eps, decay, clip) for lr, b, eps, decay, clip in (
    (2e-2, 0.9, 1e-6, 0.0, 0.0), (1e-2, 0.95, 1e-8, 0.3, 0.5), (3e-3, 0.95, 1e-8, 0.3, 0.5),
)]  # fmt: skip


def an_update_takes_the_place_of_the_config(config: RoleConfig) -> None:
    """Steps that say how they are made are those of an engine whose config says so."""
    first = UPDATES[0]
    said = make_engine(config)
    histories = [train_by(said, [(0, first), (1, first)])]
    fields = {"lr": first.lr, "betas": first.betas, "eps": first.eps, "weight_decay": 0.0, "clip_grad": 0.0}
    optimizer = dataclasses.replace(config.optimizer, min_lr=0.0, schedule="constant", warmup_steps=0, **fields)
    configured = make_engine(dataclasses.replace(config, optimizer=optimizer))
    histories.append(train_by(configured, [(0, None), (1, None)]))
    assert histories[0] == histories[1]
    assert_equal(dict(said.hf_weights()), dict(configured.hf_weights()))


def models_take_turns(config: RoleConfig) -> None:
    """Two models on one engine: each is, to the bit, what it is alone, also where the other's turn comes between the
    halves of its mini-batch, and before its first step."""
    alone = []
    for seed in (0, 100):
        engine = make_engine(config)
        history = train_by(engine, [(seed + step, update) for step, update in enumerate(UPDATES)])
        alone.append((history, dict(engine.hf_weights())))
    engine = make_engine(config)
    states = [engine.trained_state()] * 2
    histories: list[list] = [[], []]
    for step, update in enumerate(UPDATES):
        for half in (0, 1):
            for i, seed in enumerate((0, 100)):
                engine.set_trained_state(states[i])
                histories[i] += train_by(engine, [(seed + step, update)], half=half)
                states[i] = engine.trained_state()
    for state, history, expected in zip(states, histories, alone, strict=True):
        engine.set_trained_state(state)
        assert history == expected[0], (history, expected[0])
        assert_equal(dict(engine.hf_weights()), expected[1])


def train_by(
    engine: BaseEngine, steps: list[tuple[int, UpdateSettings | None]], half: int | None = None
) -> list[tuple]:
    """A mini-batch of each (seed, update) in two calls, and a step. half: 0 is the first call alone, 1 what follows it.
    Returns (losses, grad norm) of each step."""
    history = []
    for seed, update in steps:
        batch = tiny.uneven_batch(seed=seed, sequences=10)
        if half in (None, 0):
            engine.optimizer_zero_grad()
        calls = [engine.shard_data(batch.select(range(start, 10, 2))) for start in (0, 1)]
        with engine.train_mode():
            losses = [engine.forward_backward_step(call)[1] for call in (calls if half is None else [calls[half]])]
        history += [(loss, None) for loss in losses]
        if half in (None, 1):
            history.append((None, float(engine.optimizer_step(update))))
    return history


def several_labels_and_the_largest(config: RoleConfig) -> None:
    """Log-probs of K labels of a token, and the gradient of their weighted sum, are those of K batches of one each; the
    largest log-probs are ones that a batch with those labels has."""
    engine, columns = make_engine(config), 3
    batch = tiny.uneven_batch()
    labels = torch.randint(0, tiny.VOCAB, (batch.num_tokens, columns), generator=torch.Generator().manual_seed(0))
    several = dataclasses.replace(batch, labels=labels)

    def weighted(data: Batch, predictions: dict[str, Tensor], ctx: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        weights = data.loss_mask[:, None] * torch.arange(1.0, columns + 1, device=data.loss_mask.device)
        return -(predictions["log_probs"] * weights).sum(), ctx

    engine.set_loss_fn(weighted)
    ((found, loss, _),), of_several = gradients(engine, engine.shard_data(several))
    found = engine.unshard_data(found, several)["log_probs"]
    total, of_each = 0.0, []
    for k in range(columns):
        one = dataclasses.replace(batch, labels=labels[:, k])
        engine.set_loss_fn(lambda data, predictions, ctx, k=k: (loss_fn(data, predictions, ctx)[0] * (k + 1), ctx))
        ((expected, part, _),), left = gradients(engine, engine.shard_data(one))
        total += part
        of_each.append(left)
        torch.testing.assert_close(found[:, k], engine.unshard_data(expected, one)["log_probs"], rtol=1e-6, atol=1e-6)
    assert abs(loss - total) < 1e-6 * abs(total)
    assert_close(of_several, {name: sum(left[name] for left in of_each) for name in of_several}, 1e-5)
    largest_are_those(engine, batch)


def largest_are_those(engine: BaseEngine, batch: Batch, top: int = 4) -> None:
    engine.set_loss_fn(None)
    everywhere = dataclasses.replace(batch, loss_mask=torch.ones_like(batch.loss_mask))
    with engine.eval_mode():
        ctx = {"temperature": 0.7, "top": top}
        found, _ = engine.forward_backward_step(engine.shard_data(everywhere), ctx, forward_only=True)
        found = engine.unshard_data(found, everywhere)
        every = torch.arange(tiny.VOCAB).expand(batch.num_tokens, -1)
        all_labels = dataclasses.replace(everywhere, labels=every)
        whole, _ = engine.forward_backward_step(engine.shard_data(all_labels), {"temperature": 0.7}, forward_only=True)
        whole = engine.unshard_data(whole, all_labels)["log_probs"]
    torch.testing.assert_close(whole.exp().sum(1), torch.ones(batch.num_tokens), rtol=1e-5, atol=0)
    torch.testing.assert_close(found["top_log_probs"], whole.topk(top).values, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found["top_log_probs"], whole.gather(1, found["top_tokens"].cpu()), rtol=1e-6, atol=1e-6)
