"""The two halves of an iteration: a rollout made ready for training, and optimizer steps on it."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

from torch import Tensor

from mrl.algorithms.losses import ActorLoss, CriticLoss
from mrl.algorithms.policy import largest_ratio
from mrl.algorithms.recipes import actor_loss, critic_loss
from mrl.algorithms.value import explained_variance
from mrl.batch import Batch
from mrl.engine.guards import faults
from mrl.errors import TrainingError
from mrl.roles.dispatch import StepResult
from mrl.rollout.batch import trajectories_to_batch
from mrl.trainers.common import last_good, problems_in_words
from mrl.trainers.rl import guards
from mrl.trainers.rl.collect import Collected
from mrl.trainers.rl.experience import Experience, epoch_order, make_experience, mean_and_std
from mrl.trainers.rl.state import Progress, Trainer

NO_GRADIENT = "its gradient is zero"
"""How a message of engine/guards.py ends that no signal explains, too."""


# -- a rollout ----------------------------------------------------------------------------------------------------------


def prepare(trainer: Trainer, progress: Progress, collected: Collected) -> tuple[Experience, dict[str, float]]:
    """Forwards and advantages of a rollout, checked in the first iteration, and the metrics of both."""
    config, recipe, began_s = trainer.config, trainer.recipe, time.perf_counter()
    trainer.console.doing(f"step {progress.step + 1}: log-probs of the rollout")
    iteration, _ = trainer.position(progress.step)
    batch = trajectories_to_batch(collected.trajectories)
    batch = dataclasses.replace(batch, sequence_fields={**batch.sequence_fields, "groups": collected.groups_S})
    order = epoch_order(config.seed, iteration, 0, batch.num_sequences)
    scores_S = collected.scores_S[order]
    baselines_S = None if collected.baselines_S is None else collected.baselines_S[order]
    experience = make_experience(
        batch.select(order), scores_S, dispatch=trainer.dispatch, recipe=recipe, kl=trainer.kl, iteration=iteration,
        mini_batch_size=config.mini_batch_size, temperature=config.rollout.temperature,
        max_response_length=config.rollout.max_new_tokens, baselines_S=baselines_S,
        old_log_probs=not step_gives_old_log_probs(trainer, progress),
    )  # fmt: skip
    if progress.step == 0 and config.train.guards:
        check_first(trainer, experience.batch, scores_S)
    if note := trainer.equal_rewards.note(experience.batch, scores_S, recipe):
        trainer.console.say(f"step {progress.step + 1}: {note}")
    if note := trainer.token_limit.note(collected.trajectories):
        trainer.console.say(f"step {progress.step + 1}: {note}")
    mean, std = mean_and_std(experience.batch.token_fields["advantages"], experience.batch.loss_mask)
    row = {
        **collected.metrics(),
        "advantage/mean": mean,
        "advantage/std": std,
        "perf/rollout_s": collected.rollout_s,
        "perf/reward_s": collected.reward_s,
        "perf/log_probs_s": time.perf_counter() - began_s,
    }
    if recipe.needs_reference:
        row["actor/kl_coef"] = trainer.kl.coef
    if experience.has_old_log_probs:
        row |= policy_metrics(trainer, experience)
    return experience, row


def step_gives_old_log_probs(trainer: Trainer, progress: Progress) -> bool:
    """Whether the forward of the next step is the one that old log-probs are of: no other forward and no reward needs them.

    Only where the guards have found that both forwards agree to the bit (with dropout they would not).
    """
    return progress.exact and trainer.config.steps_per_iteration == 1 and trainer.recipe.kl_in != "reward"


def policy_metrics(trainer: Trainer, experience: Experience) -> dict[str, float]:
    """How far sampler and reference are from the policy that a rollout began with."""
    gaps = guards.gaps(experience.batch)
    row = {"rollout/logprob_gap": float(gaps.mean()), "rollout/logprob_gap_max": float(gaps.max())}
    if trainer.recipe.needs_reference:
        row["actor/sequence_kl"] = experience.sequence_kl
    return row


def check_first(trainer: Trainer, batch: Batch, scores_S: Tensor) -> None:
    """What is known of the first rollout's numbers before anything is trained on them."""
    dtype = trainer.config.actor.model.dtype
    if trainer.exact_sampler:
        guards.check_rollout(batch, dtype=dtype)
    if trainer.same_reference is not None:
        guards.check_reference(batch, same_layout=trainer.same_reference, dtype=dtype)
    guards.check_groups(batch, scores_S, trainer.recipe)


# -- an optimizer step --------------------------------------------------------------------------------------------------


def one_step(trainer: Trainer, progress: Progress, experience: Experience) -> tuple[dict[str, float], Experience]:
    """Trains critic and actor on the next mini-batch; `progress` has made the step then.

    Returns its metrics, and the experience with the old log-probs that it may have lacked.
    """
    config, began_s = trainer.config, time.perf_counter()
    trainer.console.doing(f"step {progress.step + 1}: training")
    iteration, number = trainer.position(progress.step)
    assert iteration == experience.iteration, (
        f"step {progress.step} with the rollout of iteration {experience.iteration}"
    )
    batch = experience.mini_batch(number, size=config.mini_batch_size, seed=config.seed)
    row: dict[str, float] = {"iteration": iteration + 1}
    if trainer.recipe.needs_critic:
        row |= train_critic(trainer, progress, batch)
    if progress.step >= config.algorithm.critic_warmup:
        of_actor, log_probs_T = train_actor(trainer, progress, batch)
        row |= of_actor
        if not experience.has_old_log_probs:
            experience = experience.with_old_log_probs(log_probs_T)
            row |= policy_metrics(trainer, experience)
        progress.tokens += batch.denominators["tokens"]
    progress.step += 1
    update_s = time.perf_counter() - began_s
    row |= {
        "train/tokens": progress.tokens,
        "perf/update_s": update_s,
        "perf/tokens_per_s": batch.num_tokens / update_s,
    }
    return row, experience


def train_critic(trainer: Trainer, progress: Progress, batch: Batch) -> dict[str, float]:
    """One optimizer step of the critic."""
    loss_fn = critic_loss(trainer.recipe, max_response_length=trainer.config.rollout.max_new_tokens)
    _, loss, found, result = train_role(trainer, progress, "critic", batch, loss_fn, {})
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


def train_actor(trainer: Trainer, progress: Progress, batch: Batch) -> tuple[dict[str, float], Tensor]:
    """One optimizer step of the actor. Returns metrics, and the log-probs [T] from before the update."""
    config, recipe = trainer.config, trainer.recipe
    loss_fn = actor_loss(recipe, max_response_length=config.rollout.max_new_tokens)
    if recipe.kl_in == "loss":
        loss_fn = dataclasses.replace(loss_fn, kl_coef=trainer.kl.coef)
    entropy = "differentiable" if recipe.entropy_coef else "detached"
    ctx = {"temperature": config.rollout.temperature, "entropy": entropy}
    log_probs_T, loss, found, result = train_role(trainer, progress, "actor", batch, loss_fn, ctx)
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
    trainer: Trainer, progress: Progress, role: str, batch: Batch, loss_fn: ActorLoss | CriticLoss, ctx: dict[str, Any]
) -> tuple[Tensor, float, dict[str, float], StepResult]:
    """One optimizer step of a role on a mini-batch. Returns what it predicted [T], its loss and metrics, and the step's result.

    Raises TrainingError where loss or gradient norm are not finite and where a guard fails; then nothing is saved but the
    batch.
    """
    dispatch, watch = trainer.dispatch, trainer.config.train.guards
    dispatch.zero_grad(role)
    predictions, loss, found = dispatch.forward_backward(role, batch, loss_fn, ctx=ctx, denominator=loss_fn.denominator)
    if not math.isfinite(loss):
        raise failed_step(trainer, progress, batch, f"the {role}'s loss is {loss}")
    (predicted_T,) = (value for name, value in predictions.items() if name in ("log_probs", "values"))
    if watch and role == "actor" and is_first_of_actor(trainer, progress):
        guards.check_ratios(predicted_T, batch)
        progress.exact = True
    guard = watch and role not in progress.trained
    result = dispatch.optim_step(role, guard=guard)
    norm = result.grad_norm
    if norm.skipped is not None or not math.isfinite(norm):
        why = f"the {role}'s gradient norm is {float(norm)}" + (f" ({norm.skipped})" if norm.skipped else "")
        raise failed_step(trainer, progress, batch, "; ".join([why, *faults(result.problems)[:5]]))
    if guard:
        note_trained(trainer, progress, role, batch, result)
    return predicted_T, loss, found, result


def is_first_of_actor(trainer: Trainer, progress: Progress) -> bool:
    """Whether the actor makes its first step, on a mini-batch whose old log-probs were computed with the same neighbours."""
    _, number = trainer.position(progress.step)
    config = trainer.config
    in_first_epoch = number * config.mini_batch_size < config.train.global_batch_size
    return progress.step == config.algorithm.critic_warmup and in_first_epoch


def note_trained(trainer: Trainer, progress: Progress, role: str, batch: Batch, result: StepResult) -> None:
    """Every parameter of a role must change once; the steps are watched until they have.

    Two gradients of zero are right: of all parameters, where no advantage or no error of a value differs from 0, and in the
    critic's first step with a gradient of all below a value head that starts at zero. Of adapters, A waits for B to move.
    """
    problems, moved = faults(result.problems), float(result.grad_norm) != 0
    waits = len(problems) < len(result.problems)
    if not moved or (role == "critic" and role not in progress.moved):
        problems = [p for p in problems if not p.endswith(NO_GRADIENT)]
    elif not problems and not waits:
        progress.trained.append(role)
    if moved and role not in progress.moved:
        progress.moved.append(role)
    if problems:
        found = problems_in_words(problems)
        raise failed_step(trainer, progress, batch, f"the step did not train the {role} as it should: {found}")


def failed_step(trainer: Trainer, progress: Progress, batch: Batch, what: str) -> TrainingError:
    """Saves the mini-batch, and says what happened in the step after `progress` and where the last good state is."""
    step, directory = progress.step + 1, trainer.directory
    kept = trainer.dispatch.on_main(lambda: directory.save_failed_batch(step, batch, []))
    good = last_good(trainer.dispatch, directory, progress.step)
    return TrainingError(f"step {step}: {what}; the mini-batch is in {kept}; {good}")


# -- the end of an iteration ---------------------------------------------------------------------------------------------


def end_iteration(trainer: Trainer, progress: Progress, experience: Experience) -> None:
    """Steers the KL's coefficient; brings the reference up to the actor where that is due."""
    if not trainer.recipe.needs_reference:
        return
    trainer.kl.update(experience.sequence_kl)
    every = trainer.config.reference.update_every
    before = progress.step - trainer.config.steps_per_iteration
    if every is not None and progress.step // every > before // every:
        trainer.dispatch.copy_weights("actor", "reference", str(trainer.directory.path))
