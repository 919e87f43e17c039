"""Rollouts for people: files in output_dir/samples, and a few samples on the console."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from mrl.algorithms.ragged import sum_per_sequence
from mrl.config.ppo import SamplesConfig
from mrl.config.ppo_checks import is_rewarded
from mrl.rewards.scorer import Scores
from mrl.rollout.base import Trajectory
from mrl.rollout.samples import bound, write_samples
from mrl.trainers.rl import scoring
from mrl.trainers.rl.collect import ScoredRollout
from mrl.trainers.rl.experience import Experience, epoch_order
from mrl.trainers.rl.trainer import PPOTrainer
from mrl.trainers.run_directory import RunDirectory

LOGGED_ROWS = 64
"""Samples of a table in wandb and tensorboard."""


def show_rollout(trainer: PPOTrainer, step: int, collected: ScoredRollout, experience: Experience) -> None:
    """Writes a rollout that `step` is the first to be trained on, and shows some of its samples."""
    config, log = trainer.config, trainer.log
    order = epoch_order(config.seed, experience.iteration, 0, len(collected.trajectories))
    as_sampled = torch.tensor(order).argsort().tolist()
    advantages_S = mean_advantages(experience)[as_sampled]
    wanted = config.log.samples
    if wanted.every is not None and is_due(step, wanted.every, config.steps_per_iteration):
        of_tokens = token_advantages(experience)
        of_tokens = [of_tokens[i] for i in as_sampled]
        trainer.dispatch.on_main(
            lambda: write_rollout(trainer.directory, wanted, step, collected, advantages_S.tolist(), of_tokens)
        )
    if log.has_sinks:
        log.histograms(step, histograms(collected, advantages_S.tolist()))
    if not is_due(step, config.log.table_every, config.steps_per_iteration):
        return
    rewarded = is_rewarded(config)
    trainer.console.samples(table(collected.trajectories, collected.scores, config.log.table, rewarded=rewarded))
    if log.has_sinks:
        rows = table(collected.trajectories, collected.scores, LOGGED_ROWS, rewarded=rewarded)
        labels = list(rows[0][3])
        cells: list[list[str | float | None]] = [
            [prompt, completion, reward, *parts.values()] for prompt, completion, reward, parts in rows
        ]
        log.table(step, "samples", ["prompt", "completion", "reward", *labels], cells)


def is_due(step: int, every: int, steps_per_rollout: int) -> bool:
    """Returns whether a rollout is shown or written: the first one, and one for each `every` more steps. step: the
    first one on the rollout."""
    return (step - 1) % every < steps_per_rollout


def histograms(collected: ScoredRollout, advantages: list[float]) -> dict[str, list[float]]:
    """One number for each sequence of a rollout, by the name under which wandb and tensorboard show them."""
    lengths = [float(t.response_length) for t in collected.trajectories]
    return {
        "histogram/reward": list(collected.scores.totals),
        "histogram/response_length": lengths,
        "histogram/advantage": advantages,
    }


def write_rollout(
    directory: RunDirectory,
    wanted: SamplesConfig,
    step: int,
    collected: ScoredRollout,
    advantages: list[float],
    of_tokens: list[list[float] | None],
) -> None:
    """Writes the file of a rollout, and one of the greedy answers.

    Groups that gave way to others have no advantage. The order is the one of sampling, so a replay is the same even if
    prompts came twice.
    """
    rejected, of_rejected = collected.rejected
    trajectories = [*collected.trajectories, *rejected]
    with_none: list[float | None] = [*advantages, *(None for _ in rejected)]
    of_tokens = [*of_tokens, *(None for _ in rejected)]
    scores = scoring.joined([collected.scores, of_rejected]) if rejected else collected.scores
    scores = scoring.select(scores, collected.sampled)
    folder = str(directory.samples)
    write = functools.partial(write_samples, folder, step, tokens=wanted.tokens, compress=wanted.compress)
    write(
        [trajectories[i] for i in collected.sampled],
        rewards=scores.totals,
        parts=scores.parts,
        advantages=[with_none[i] for i in collected.sampled],
        token_advantages=[of_tokens[i] for i in collected.sampled],
    )
    greedy, of_greedy = collected.greedy
    if greedy:
        write(greedy, series="baseline", rewards=of_greedy.totals, parts=of_greedy.parts)
    bound(folder, keep=wanted.keep, max_mb=wanted.max_mb)


def mean_advantages(experience: Experience) -> Tensor:
    """[S]: over each sequence's trained tokens."""
    batch = experience.batch
    counts_S = sum_per_sequence((batch.loss_mask != 0).double(), batch.lengths)
    return sum_per_sequence(batch.token_fields["advantages"].double(), batch.lengths) / counts_S.clamp(min=1)


def token_advantages(experience: Experience) -> list[list[float] | None]:
    """Returns the advantages of each sequence's tokens, 0 for those that were not sampled. It is None for a sequence
    whose tokens all have the same one, as with a reward of the whole answer and no critic. Six digits: nobody computes
    with them."""
    batch = experience.batch
    lengths = batch.lengths.tolist()
    parts = zip(batch.token_fields["advantages"].split(lengths), batch.loss_mask.split(lengths), strict=True)
    found: list[list[float] | None] = []
    for advantages_T, mask_T in parts:
        trained_T = advantages_T[mask_T != 0]
        if bool((trained_T == trained_T[:1]).all()):
            found.append(None)
            continue
        # a batch has the advantage of a token where that is predicted, one place before the token
        found.append([0.0, *(float(f"{x:.6g}") for x in advantages_T.tolist())])
    return found


def table(
    trajectories: Sequence[Trajectory], scores: Scores, rows: int, *, rewarded: bool = True
) -> list[tuple[str, str, float | None, dict[str, float]]]:
    """Returns (prompt, completion, reward, its parts) of a few samples, each of another prompt where there are as many.

    rewarded: whether anything adds to rewards; else they are None, as they would be zeros.
    """
    if not rows:
        return []
    places = range(0, len(trajectories), max(1, len(trajectories) // rows))
    return [
        (
            last_turn_text(trajectories[i]),
            text_after_prompt(trajectories[i]),
            scores.totals[i] if rewarded else None,
            {label: values[i] for label, values in scores.parts.items()},
        )
        for i in list(places)[:rows]
    ]


def text_after_prompt(trajectory: Trajectory) -> str:
    """Returns the text after the prompt: the completion, or of a conversation a line for each message, with its
    role."""
    if trajectory.conversation is None:
        return trajectory.text
    return "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in trajectory.conversation)


def last_turn_text(trajectory: Trajectory) -> str:
    """Returns the prompt's text, or its last message."""
    content = trajectory.prompt.content
    return content if isinstance(content, str) else str(content[-1]["content"])
