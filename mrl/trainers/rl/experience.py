"""From a rollout to what is trained on: log-probs, KL, rewards of tokens, advantages; and its mini-batches.

Dimensions: `T` tokens of all sequences of the rollout end to end, `S` sequences.

The sequences are put into the order of the first epoch's mini-batches at once, and old log-probs, reference log-probs
and values are computed mini-batch by mini-batch. So the forward of a mini-batch is the same computation in all of these
and in the first update. Its ratios are exactly 1, and the KL to an equal reference is exactly 0. If a rollout is
trained on in a single step, the forward of that step gives the old log-probs, and none is made before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mrl.algorithms.advantages import AdvantageInputs, overlong_penalty, token_rewards
from mrl.algorithms.kl import KLController, kl_estimate
from mrl.algorithms.ragged import tokens_after_prompt
from mrl.algorithms.recipes import Recipe, advantages, overlong_cache
from mrl.batch import Batch
from mrl.data.stream import row_order
from mrl.engine.sampling import noise_key
from mrl.roles.dispatch import WorkerDispatch
from mrl.trainers.rl.roles import References, kl_of_sequences, mini_batches

ORDER = 0x6D696E69
"""Keeps the order of mini-batches apart from that of the prompts, which follows from the same seed."""


@dataclasses.dataclass(frozen=True)
class Experience:
    """A rollout that is trained on."""

    batch: Batch
    """All sequences, in the order of the first epoch.

    Token fields, 0 where nothing trains: rollout_log_probs, old_log_probs (perhaps only after its step), advantages;
    ref_log_probs with a KL; with a teacher's distributions its ids and their log-probs; old_values and returns with a
    critic. Sequence fields: groups; with several teachers the number of each sequence's.
    """
    iteration: int  # its number, from 0

    @property
    def has_old_log_probs(self) -> bool:
        return "old_log_probs" in self.batch.token_fields

    def with_old_log_probs(self, log_probs_T: Tensor) -> "Experience":
        """log_probs_T: what the forward of its only step, on all of its sequences in their order, gave before the
        update."""
        fields = {**self.batch.token_fields, "old_log_probs": _trained(log_probs_T, self.batch)}
        return dataclasses.replace(self, batch=dataclasses.replace(self.batch, token_fields=fields))

    @property
    def sequence_kl(self) -> float:
        """Nats per sequence, policy to reference; there must be one."""
        return kl_of_sequences(self.batch)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers, for a checkpoint in the middle of an iteration."""
        fields = vars(self.batch)
        plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in fields.items()}
        return {"batch": plain, "iteration": self.iteration}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "Experience":
        return cls(Batch(**state["batch"]), state["iteration"])

    def mini_batch(self, number: int, *, size: int, seed: int) -> Batch:
        """Returns the mini-batch of the iteration's step `number`, from 0; its denominators are its own."""
        epoch, part = divmod(number, self.batch.num_sequences // size)
        count = self.batch.num_sequences
        order = range(count) if epoch == 0 else epoch_order(seed, self.iteration, epoch, count)
        return self.batch.select(order[part * size : (part + 1) * size]).with_denominators()


def epoch_order(seed: int, iteration: int, epoch: int, count: int) -> list[int]:
    """Returns the order of an epoch's sequences: a function of its arguments."""
    return row_order(noise_key((seed, ORDER, iteration), epoch), 0, count).tolist()


def forward(
    dispatch: WorkerDispatch, role: str, batch: Batch, *, name: str, size: int, ctx: Mapping[str, Any] | None = None
) -> Tensor:
    """[T]: what a role predicts (`name`: log_probs or values) of each token, 0 where nothing trains.

    Computed by mini-batches of `size`, as in training.
    """
    parts = [
        dispatch.forward(role, part, None if ctx is None else dict(ctx))[name] for part in mini_batches(batch, size)
    ]
    return _trained(torch.cat(parts), batch)


def _trained(values_T: Tensor, batch: Batch) -> Tensor:
    """[T] fp32, 0 where nothing trains."""
    return values_T.float().masked_fill(batch.loss_mask == 0, 0.0)


def make_experience(
    batch: Batch,
    scores_S: Tensor,
    *,
    dispatch: WorkerDispatch,
    recipe: Recipe,
    references: References | None,
    kl: KLController,
    iteration: int,
    mini_batch_size: int,
    temperature: float,
    max_response_length: int,
    baselines_S: Tensor | None,
    old_log_probs: bool = True,
) -> Experience:
    """Returns the forwards of all roles and what follows from them.

    batch: the rollout in the order of the first epoch, with rollout_log_probs and the sequence field groups. Rewards
    `scores_S` [S] fp64 are in that order. baselines_S: likewise, of the greedy answers, if the recipe has them.
    old_log_probs: False if the only step will give them. A KL in the reward is made of them, so they are needed then.
    references: None if the recipe needs none.
    """
    ctx = {"temperature": temperature}
    fields = dict(batch.token_fields)
    if old_log_probs:
        fields["old_log_probs"] = forward(dispatch, "actor", batch, name="log_probs", size=mini_batch_size, ctx=ctx)
    kl_T = None
    if references is not None:
        fields |= references.say(batch, size=mini_batch_size, temperature=temperature)
    if recipe.kl_in == "reward":
        old_T, reference_T = fields["old_log_probs"].double(), fields["ref_log_probs"].double()
        kl_T = kl_estimate(old_T, reference_T, recipe.kl_estimator, cap=recipe.kl_cap)
    if recipe.needs_critic:
        fields["old_values"] = forward(dispatch, "critic", batch, name="values", size=mini_batch_size)
    if cache := overlong_cache(recipe, max_response_length=max_response_length):
        lengths_S = tokens_after_prompt(batch.loss_mask, batch.lengths)
        scores_S = scores_S + overlong_penalty(lengths_S, max_length=max_response_length, cache=cache)
    rewards_T = token_rewards(scores_S, batch.loss_mask, batch.lengths, kl_T=kl_T, kl_coef=kl.coef)
    rollout = AdvantageInputs(
        rewards_T=rewards_T,
        mask_T=batch.loss_mask,
        lengths_S=batch.lengths,
        groups_S=batch.sequence_fields["groups"],
        values_T=fields["old_values"].double() if recipe.needs_critic else None,
        baselines_S=baselines_S,
    )
    advantages_T, returns_T = advantages(recipe, rollout)
    fields["advantages"] = advantages_T.float()
    if returns_T is not None:
        fields["returns"] = returns_T.float()
    return Experience(dataclasses.replace(batch, token_fields=fields), iteration)


def mean_and_std(values_T: Tensor, mask_T: Tensor) -> tuple[float, float]:
    """Over the tokens that train; the population's std."""
    trained = values_T[mask_T != 0].double()
    return float(trained.mean()), float(trained.std(correction=0))
