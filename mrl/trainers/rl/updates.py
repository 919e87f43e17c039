"""Optimizer steps of the roles that train, on one mini-batch."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from mrl.algorithms.losses import ActorLoss, CriticLoss, explained_variance
from mrl.algorithms.policy import effective_samples, largest_ratio
from mrl.algorithms.recipes import actor_loss, critic_loss
from mrl.batch import Batch
from mrl.roles.dispatch import StepResult
from mrl.trainers.rl import invariants
from mrl.trainers.rl.experience import Experience
from mrl.trainers.rl.teachers import with_ids
from mrl.trainers.rl.trainer import PPOTrainer
from mrl.trainers.step_guard import StepGuard


def train_critic(trainer: PPOTrainer, batch: Batch) -> dict[str, float]:
    """One optimizer step of the critic."""
    loss_fn = critic_loss(trainer.recipe, max_response_length=trainer.config.rollout.max_new_tokens)
    _, loss, found, result = train_role(trainer, "critic", batch, loss_fn, {})
    explained = explained_variance(
        returns=found["critic/returns"], returns_squared=found["critic/returns_squared"],
        error=found["critic/error"], error_squared=found["critic/error_squared"],
    )  # fmt: skip
    return {
        "critic/loss": loss,
        "critic/value": found["critic/value"],
        "critic/clip_fraction": found["critic/clip_fraction"],
        "critic/explained_variance": explained,
        "critic/grad_norm": float(result.grad_norm),
        "critic/lr": result.lr,
    }


def train_actor(trainer: PPOTrainer, batch: Batch) -> tuple[dict[str, float], Tensor]:
    """One optimizer step of the actor. Returns metrics, and the log-probs [T] from before the update."""
    config, recipe = trainer.config, trainer.recipe
    loss_fn = actor_loss(recipe, max_response_length=config.rollout.max_new_tokens)
    if recipe.kl_in in ("loss", "exact"):
        loss_fn = dataclasses.replace(loss_fn, kl_coef=trainer.kl.coef)
    if trainer.references is not None and trainer.references.distill is not None:
        loss_fn, batch = dataclasses.replace(loss_fn, distill=trainer.references.distill), with_ids(batch)
    entropy = "differentiable" if recipe.entropy_coef else "detached"
    ctx = {"temperature": config.rollout.temperature, "entropy": entropy}
    log_probs_T, loss, found, result = train_role(trainer, "actor", batch, loss_fn, ctx)
    found = {"actor/mtp_loss" if name == "mtp_loss" else name: value for name, value in found.items()}
    squared = found.pop("actor/importance_squared", None)
    if squared is not None:
        found["actor/effective_samples"] = effective_samples(found["actor/importance_weight"], squared)
    old_log_probs_T = batch.token_fields.get("old_log_probs", log_probs_T)
    row = {
        "train/loss": loss,
        "train/grad_norm": float(result.grad_norm),
        "train/lr": result.lr,
        "actor/loss": loss,
        **found,
        "actor/ratio_max": largest_ratio(log_probs_T, old_log_probs_T, batch.loss_mask),
    }
    return row, log_probs_T


def train_role(
    trainer: PPOTrainer, role: str, batch: Batch, loss_fn: ActorLoss | CriticLoss, ctx: dict[str, Any]
) -> tuple[Tensor, float, dict[str, float], StepResult]:
    """One optimizer step of a role. Returns what it predicted [T], its loss and metrics, and the step's result.

    Raises TrainingError if loss or gradient norm are not finite or a guard fails. Then nothing is saved but the batch.
    """
    dispatch, head = trainer.dispatch, "value" if role == "critic" else "lm"
    guard = StepGuard(trainer, role, batch, head=head, may_be_zero=True)
    dispatch.zero_grad(role)
    predictions, loss, found = dispatch.forward_backward(
        role, batch, loss_fn, ctx=ctx | {"last": True}, denominator=loss_fn.denominator
    )
    predicted = predictions["values" if role == "critic" else "log_probs"]
    predicted_T = predicted if predicted.dim() == 1 else predicted[:, 0]  # of the sampled token, among a teacher's ids
    guard.before_update(loss)
    if role == "actor" and trainer.config.train.guards and _is_first_of_actor(trainer):
        invariants.check_ratios(predicted_T, batch)
        trainer.progress.exact = True
    result = dispatch.optim_step(role, guard=guard.watches_parameters)
    guard.after_update(result)
    return predicted_T, loss, found, result


def _is_first_of_actor(trainer: PPOTrainer) -> bool:
    """Returns whether the actor makes its first step, on a mini-batch whose old log-probs were computed with the same
    neighbours."""
    config, step = trainer.config, trainer.progress.step
    _, number = trainer.position(step)
    in_first_epoch = number * config.mini_batch_size < config.train.global_batch_size
    return step == config.algorithm.critic_warmup and in_first_epoch


def end_iteration(trainer: PPOTrainer, experience: Experience) -> None:
    """Steers the KL's coefficient. Gives the reference the actor's weights if that is due."""
    if not trainer.recipe.needs_reference:
        return
    trainer.kl.update(experience.sequence_kl)
    every, step = trainer.config.reference.update_every, trainer.progress.step
    before = step - trainer.config.steps_per_iteration
    if every is not None and step // every > before // every:
        trainer.dispatch.copy_weights("actor", "reference", str(trainer.directory.path))
