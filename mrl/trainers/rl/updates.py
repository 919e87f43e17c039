"""An iteration after its rewards: the forwards of all roles and the advantages, their checks and metrics, and the
optimizer steps.

**The checks** are of the first iteration: what is equal in theory must be equal here before anything is trained on it.
Each raises TrainingError naming what differs, by how much, and what to look at. A sampler beside the trainer's own
engine and a reference with other weights are not checked, because nothing is promised of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from mrl.algorithms.advantages import ESTIMATORS, groups_with_signal
from mrl.algorithms.distill import TEACHER_OF, teacher_numbers
from mrl.algorithms.losses import ActorLoss, CriticLoss, explained_variance
from mrl.algorithms.policy import effective_samples, largest_ratio
from mrl.algorithms.ragged import sum_per_sequence, to_tokens
from mrl.algorithms.recipes import Recipe, actor_loss, critic_loss
from mrl.batch import Batch
from mrl.config.ppo_checks import REWARD_METRICS, is_rewarded
from mrl.errors import TrainingError
from mrl.roles.dispatch import StepResult
from mrl.rollout.base import trajectories_to_batch
from mrl.trainers.rl.collect import ScoredRollout
from mrl.trainers.rl.experience import Experience, epoch_order, make_experience, mean_and_std
from mrl.trainers.rl.roles import with_ids
from mrl.trainers.rl.trainer import PPOTrainer
from mrl.trainers.step_guard import StepGuard


def prepare(trainer: PPOTrainer, collected: ScoredRollout) -> Experience:
    """Log-probs, values and advantages of a rollout, whose sequences are put into the order of the first epoch."""
    config, progress = trainer.config, trainer.progress
    trainer.console.doing(f"step {progress.step + 1}: log-probs of the rollout")
    iteration, _ = trainer.position(progress.step)
    batch = trajectories_to_batch(collected.trajectories)
    own = {"groups": collected.groups_S}
    if config.reference.others:
        own[TEACHER_OF] = torch.tensor([t.prompt.teacher for t in collected.trajectories])
    batch = dataclasses.replace(batch, sequence_fields={**batch.sequence_fields, **own})
    order = epoch_order(config.seed, iteration, 0, batch.num_sequences)
    return make_experience(
        batch.select(order),
        collected.scores_S[order],
        dispatch=trainer.dispatch,
        recipe=trainer.recipe,
        references=trainer.references,
        kl=trainer.kl,
        iteration=iteration,
        mini_batch_size=config.mini_batch_size,
        temperature=config.rollout.temperature,
        max_response_length=config.rollout.max_new_tokens,
        baselines_S=None if collected.baselines_S is None else collected.baselines_S[order],
        old_log_probs=not step_gives_old_log_probs(trainer),
    )


def step_gives_old_log_probs(trainer: PPOTrainer) -> bool:
    """Returns whether the next step's own forward can serve as the old log-probs: no reward needs them before it.

    Only after the guards have found both forwards equal to the bit; with dropout they would not be.
    """
    return trainer.progress.exact and trainer.config.steps_per_iteration == 1 and trainer.recipe.kl_in != "reward"


def check_rollout(trainer: PPOTrainer, collected: ScoredRollout, experience: Experience) -> None:
    """Raises TrainingError if the first rollout has impossible numbers. Tells the user of one that teaches little."""
    config, progress, batch = trainer.config, trainer.progress, experience.batch
    scores_S = collected.scores_S[epoch_order(config.seed, experience.iteration, 0, batch.num_sequences)]
    if progress.step == 0 and config.train.guards:
        dtype = config.actor.model.dtype
        if trainer.rollouts.exact:
            check_sampler(batch, dtype=dtype)
        references = trainer.references
        if references is not None and references.same_layout is not None:
            check_reference(batch, same_layout=references.same_layout, dtype=dtype)
        check_groups(batch, scores_S, trainer.recipe)
    if not trainer.said_equal_rewards and has_equal_rewards(batch, scores_S, trainer.recipe):
        trainer.said_equal_rewards = True
        trainer.console.say(
            f"step {progress.step + 1}: every group's rewards are equal: this rollout trains nothing by rewards; if "
            "it stays so, give prompts of another difficulty, more rollout.samples_per_prompt, or rewards that tell "
            "completions apart"
        )


def has_equal_rewards(batch: Batch, scores_S: Tensor, recipe: Recipe) -> bool:
    """Returns whether an algorithm of group differences learns nothing from a rollout. scores_S: in its order.

    It is allowed: a task may be too hard at first, and such a step leaves the policy about where it is.
    """
    if ESTIMATORS[recipe.advantage].needs != "groups_S":
        return False
    small = float(batch.token_fields["advantages"].abs().max()) < 1e-6  # a KL or a length in the rewards makes more
    return small and not bool(groups_with_signal(scores_S, batch.sequence_fields["groups"]).any())


def rollout_metrics(
    trainer: PPOTrainer, collected: ScoredRollout, experience: Experience, *, log_probs_s: float
) -> dict[str, float]:
    """Returns metrics of a rollout. log_probs_s: seconds that its forwards took."""
    mean, std = mean_and_std(experience.batch.token_fields["advantages"], experience.batch.loss_mask)
    row = {
        **collected.metrics(),
        "advantage/mean": mean,
        "advantage/std": std,
        "perf/rollout_s": collected.rollout_s,
        "perf/reward_s": collected.reward_s,
        "perf/log_probs_s": log_probs_s,
    }
    for sampling in trainer.samplings:
        weights_s = sampling.take_seconds()
        if weights_s is not None:
            row["perf/weights_s"] = row.get("perf/weights_s", 0.0) + weights_s
    if not is_rewarded(trainer.config):  # they would be of zeros
        row = {name: value for name, value in row.items() if name not in REWARD_METRICS}
    if trainer.recipe.needs_reference:
        row["actor/kl_coef"] = trainer.kl.coef
    if experience.has_old_log_probs:
        row |= policy_metrics(trainer, experience)
    return row


def policy_metrics(trainer: PPOTrainer, experience: Experience) -> dict[str, float]:
    """Distances of sampler and reference from the policy that a rollout began with."""
    gaps_T = gaps(experience.batch)
    row = {"rollout/logprob_gap": float(gaps_T.mean()), "rollout/logprob_gap_max": float(gaps_T.max())}
    if trainer.references is not None:
        row["actor/sequence_kl"] = experience.sequence_kl
        row |= trainer.references.metrics(experience.batch)
    return row


FP32_GAP, FP32_LARGEST = 1e-5, 1e-4
"""How far the log-probs of sampler and trainer may be apart, in the mean and for a token, in nats: generation adds up
in another order. Of an unlikely token (below -1 nat), whose log-prob is a difference of two large numbers, the bound is
relative; 30 layers make 1.5e-5 of it. What is wrong (a temperature, a mask, older weights) makes more than 1e-3."""

BF16_MEAN_GAP = 0.05
"""Largest mean difference in bfloat16, whose logits of size 16 are rounded to 1/16."""


def check_sampler(batch: Batch, *, dtype: str) -> None:
    """The sampler's log-probs are the trainer's: same weights, temperature, positions and mask."""
    gap_T = gaps(batch)
    if not gap_T.numel():
        return
    found = [(float(gap_T.mean()), FP32_GAP if dtype == "float32" else BF16_MEAN_GAP, "in the mean by")]
    if dtype == "float32":
        old_T = batch.token_fields["old_log_probs"][batch.loss_mask != 0].double()
        found.append((float((gap_T / old_T.abs().clamp(min=1.0)).max()), FP32_LARGEST, "by up to"))
    for value, limit, what in found:
        if not value <= limit:
            raise TrainingError(
                f"the first rollout's log-probs differ from the trainer's {what} {value:.3g} nats ({limit:g} is "
                "allowed). The policy that samples is not the one that trains: report this, or set train.guards to "
                "false to go on"
            )


def gaps(batch: Batch) -> Tensor:
    """[trained tokens] fp64: |log p of the sampler - log p of the trainer|."""
    fields, trained_T = batch.token_fields, batch.loss_mask != 0
    return (fields["rollout_log_probs"].double() - fields["old_log_probs"].double())[trained_T].abs()


def check_reference(batch: Batch, *, same_layout: bool, dtype: str) -> None:
    """The reference is the actor before its first update, so their KL is 0; exactly, where both compute alike.

    Sequences of other teachers, whose weights are others, are left out.
    """
    fields, of_T = batch.token_fields, to_tokens(teacher_numbers(batch), batch.lengths)
    own_T = (batch.loss_mask != 0) & (of_T == 0)
    differences = (fields["old_log_probs"].double() - fields["ref_log_probs"].double())[own_T].abs()
    if not differences.numel():
        return
    largest, mean = float(differences.max()), float(differences.mean())
    limit, value = (
        (0.0, largest) if same_layout else (FP32_GAP, largest) if dtype == "float32" else (BF16_MEAN_GAP, mean)
    )
    if not value <= limit:
        raise TrainingError(
            f"the reference's log-probs differ from the actor's by {value:.3g} nats before the first update ({limit:g} "
            "is allowed). Both have the same model: report this, or set train.guards to false to go on"
        )


def check_ratios(predicted_T: Tensor, batch: Batch) -> None:
    """The first update's forward gives the log-probs that were computed before it: every ratio is exactly 1."""
    trained_T = batch.loss_mask != 0
    old_T = batch.token_fields["old_log_probs"]
    differing = (predicted_T.to(old_T.device).float() != old_T) & trained_T
    if bool(differing.any()):
        largest = float((predicted_T.to(old_T.device).double() - old_T.double())[trained_T].abs().max())
        raise TrainingError(
            f"before the first update {int(differing.sum())} of {int(trained_T.sum())} ratios are not 1 (log-probs "
            f"differ by up to {largest:.3g}). The training forward is another one than the forward for old log-probs. "
            "Set a dropout of config.json to 0; else report this, or set train.guards to false to go on"
        )


def check_groups(batch: Batch, scores_S: Tensor, recipe: Recipe) -> None:
    """Within a group, advantages add up to zero where they are differences from its mean.

    scores_S: only for the message. Whitened advantages have the rollout's mean taken away, so the rollout's sum is
    zero.
    """
    advantages_T, mask_T, lengths_S = batch.token_fields["advantages"].double(), batch.loss_mask, batch.lengths
    if recipe.whiten:
        total, size = float(advantages_T[mask_T != 0].sum()), float(advantages_T.abs().sum())
        where = "of the rollout"
    elif ESTIMATORS[recipe.advantage].needs == "groups_S":
        counts_S = sum_per_sequence((mask_T != 0).double(), lengths_S)
        per_sequence_S = sum_per_sequence(advantages_T, lengths_S) / counts_S.clamp(min=1)
        groups_S = batch.sequence_fields["groups"]
        _, group_S = groups_S.unique(return_inverse=True)
        totals = torch.zeros(int(group_S.max()) + 1, dtype=torch.float64).index_add_(0, group_S, per_sequence_S)
        worst = int(totals.abs().argmax())
        total, size = float(totals[worst]), float(per_sequence_S[group_S == worst].abs().sum())
        where = f"of a group with the rewards {[round(r, 4) for r in scores_S[group_S == worst].tolist()]}"
    else:
        return
    if abs(total) > 1e-5 * max(size, 1e-3):  # they are kept in fp32
        raise TrainingError(f"the advantages {where} add up to {total:.3g}, not to 0; report this")


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
        check_ratios(predicted_T, batch)
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
