"""Rollouts for people: files in output_dir/samples, and a few samples on the console."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mrl.algorithms.ragged import sum_per_sequence
from mrl.config.ppo import PPOConfig
from mrl.rewards.scorer import Scores
from mrl.roles.dispatch import WorkerDispatch
from mrl.rollout import samples
from mrl.rollout.base import Trajectory
from mrl.trainers.rl import scoring
from mrl.trainers.rl.collect import Collected
from mrl.trainers.rl.experience import Experience, epoch_order
from mrl.trainers.rl.state import Trainer
from mrl.trainers.run_directory import RunDirectory


def show_rollout(trainer: Trainer, step: int, collected: Collected, experience: Experience) -> None:
    """Writes a rollout that `step` is the first to be trained on, and shows some of its samples."""
    config = trainer.config
    order = epoch_order(config.seed, experience.iteration, 0, len(collected.trajectories))
    advantages_S = mean_advantages(experience)[torch.tensor(order).argsort()]  # back as they were sampled
    if config.log.samples:
        trainer.dispatch.on_main(
            lambda: samples.write(
                samples.rollout_path(trainer.directory.path, step),
                step,
                collected.trajectories,
                totals=collected.scores.totals,
                parts=collected.scores.parts,
                advantages=advantages_S.tolist(),
            )  # fmt: skip
        )
    trainer.console.samples(step, table(collected.trajectories, collected.scores, config.log.table))


def show_evaluation(
    config: PPOConfig, dispatch: WorkerDispatch, directory: RunDirectory, step: int, trajectories: Sequence[Trajectory], scores: Scores
) -> None:  # fmt: skip
    """Writes the answers to held-out prompts after `step`."""
    if config.log.samples:
        path = samples.evaluation_path(directory.path, step)
        dispatch.on_main(
            lambda: samples.write(path, step, trajectories, totals=scores.totals, parts=scores.parts, advantages=None)
        )


def mean_advantages(experience: Experience) -> Tensor:
    """[S]: over each sequence's trained tokens."""
    batch = experience.batch
    counts_S = sum_per_sequence((batch.loss_mask != 0).double(), batch.lengths)
    return sum_per_sequence(batch.token_fields["advantages"].double(), batch.lengths) / counts_S.clamp(min=1)


def table(
    trajectories: Sequence[Trajectory], scores: Scores, rows: int
) -> list[tuple[str, str, float, dict[str, float]]]:
    """(prompt, completion, reward, its parts) of a few samples, each of another prompt where there are as many."""
    if not rows:
        return []
    places = range(0, len(trajectories), max(1, len(trajectories) // rows))
    return [
        (last_words(trajectories[i]), trajectories[i].text, scores.totals[i], scoring.by_sample(scores, i))
        for i in list(places)[:rows]
    ]


def last_words(trajectory: Trajectory) -> str:
    """The prompt's text, or its last message."""
    content = trajectory.prompt.content
    return content if isinstance(content, str) else str(content[-1]["content"])
