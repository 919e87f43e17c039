"""From rewards to what is trained on: the forwards of all roles and the advantages, their checks, and their metrics."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from mrl.algorithms.advantages import ESTIMATORS, groups_with_signal
from mrl.algorithms.distill import TEACHER_OF
from mrl.algorithms.recipes import Recipe
from mrl.batch import Batch
from mrl.config.ppo_checks import REWARD_METRICS, is_rewarded
from mrl.rollout.base import trajectories_to_batch
from mrl.trainers.rl import invariants
from mrl.trainers.rl.collect import ScoredRollout
from mrl.trainers.rl.experience import Experience, epoch_order, make_experience, mean_and_std
from mrl.trainers.rl.trainer import PPOTrainer


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
            invariants.check_rollout(batch, dtype=dtype)
        references = trainer.references
        if references is not None and references.same_layout is not None:
            invariants.check_reference(batch, same_layout=references.same_layout, dtype=dtype)
        invariants.check_groups(batch, scores_S, trainer.recipe)
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
    gaps = invariants.gaps(experience.batch)
    row = {"rollout/logprob_gap": float(gaps.mean()), "rollout/logprob_gap_max": float(gaps.max())}
    if trainer.references is not None:
        row["actor/sequence_kl"] = experience.sequence_kl
        row |= trainer.references.metrics(experience.batch)
    return row
