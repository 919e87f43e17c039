"""The first half of an iteration: prompts, completions, rewards; nothing is trained here.

Dimensions: `S` sequences of the rollout, prompt-major: the samples of a prompt are neighbours.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mrl.algorithms.advantages import groups_with_signal
from mrl.data.prompts import Prompt, PromptSource
from mrl.errors import DataError, TrainingError, UserError
from mrl.rewards.scorer import Scores, metrics
from mrl.roles.dispatch import WorkerDispatch
from mrl.rollout.base import Trajectory, TrajectorySource
from mrl.trainers.rl import scoring


def take_together(source: PromptSource, count: int, dispatch: WorkerDispatch) -> list[Prompt]:
    """Returns the next prompts. A row that one rank cannot read is an error on all, so all can save together.

    Collective.
    """
    prompts: list[Prompt] = []
    error: UserError | None = None
    try:
        prompts = source.take(count)
    except UserError as caught:
        error = caught
    (anywhere,) = dispatch.max_over_ranks(error is not None)
    if anywhere:
        raise error or DataError("another rank cannot read its rows of data.train")
    return prompts


@dataclasses.dataclass(frozen=True)
class ScoredRollout:
    """A rollout with its rewards."""

    trajectories: list[Trajectory]
    scores: Scores
    groups_S: Tensor  # int64, which prompt of the rollout each sequence answers
    baselines_S: Tensor | None  # fp64, the greedy answer's reward, of an algorithm that has it
    rejected: tuple[list[Trajectory], Scores]  # groups that gave way to others, with their rewards
    greedy: tuple[list[Trajectory], Scores]  # the greedy answers, with their rewards
    sampled: list[int]  # the order of sampling: indices into `trajectories`, with `rejected` after it
    rollout_s: float  # seconds of sampling, of all these
    reward_s: float  # seconds of scoring

    @property
    def scores_S(self) -> Tensor:
        return torch.tensor(self.scores.totals, dtype=torch.float64)

    def metrics(self) -> dict[str, float]:
        """`reward/...` and `rollout/...` of the trained trajectories, but tokens per second of all sampled ones."""
        lengths = [t.response_length for t in self.trajectories]
        finished = [t.response_length for t in self.trajectories if t.finished]
        prompts = [t.prompt_length for t in self.trajectories]
        beside = [t.response_length for t in (*self.rejected[0], *self.greedy[0])]
        groups = len(self.groups_S.unique())
        rejected = len(self.rejected[0]) / (len(lengths) // groups)
        row = {
            **metrics(self.scores),
            "rollout/response_length": sum(lengths) / len(lengths),
            "rollout/response_length_min": min(lengths),
            "rollout/response_length_max": max(lengths),
            "rollout/prompt_length": sum(prompts) / len(prompts),
            "rollout/prompt_length_max": max(prompts),
            "rollout/finished": len(finished) / len(lengths),
            **conversation_metrics(self.trajectories),
            "rollout/tokens_per_s": (sum(lengths) + sum(beside)) / self.rollout_s,
            "rollout/prompts_rejected": rejected,
        }
        row["reward/faults"] += len(self.greedy[1].faults)
        if finished:
            row["rollout/response_length_finished"] = sum(finished) / len(finished)
        if len(lengths) > groups:
            with_signal_S = groups_with_signal(self.scores_S, self.groups_S)
            equal = groups - len(self.groups_S[with_signal_S].unique())
            row["reward/equal_groups"] = (equal + rejected) / (groups + rejected)
        return row


def with_models(rollout: ScoredRollout, scores: scoring.Scoring) -> ScoredRollout:
    """Returns the rollout with the reward model's scores, which `Scoring.on_this_process` left out. Collective."""
    both = scores.by_models(rollout.scores, rollout.trajectories)
    if rollout.baselines_S is None:
        return dataclasses.replace(rollout, scores=both)
    answers, of_functions = rollout.greedy
    greedy = scores.by_models(of_functions, answers)
    baselines_S = _baselines(greedy, len(rollout.trajectories) // len(answers))
    return dataclasses.replace(rollout, scores=both, greedy=(answers, greedy), baselines_S=baselines_S)


def _baselines(greedy: Scores, samples: int) -> Tensor:
    """[S] fp64, the greedy answer's reward for each of the `samples` of its prompt."""
    return torch.tensor(greedy.totals, dtype=torch.float64).repeat_interleave(samples)


def conversation_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Turns, tool calls and lengths of turns; nothing where the trajectories are no conversations."""
    if any(t.conversation is None for t in trajectories):
        return {}
    count, turns = len(trajectories), sum(t.turns for t in trajectories)
    return {
        "rollout/turns": turns / count,
        "rollout/tool_calls": sum(t.tool_calls for t in trajectories) / count,
        "rollout/turn_length": sum(t.response_length for t in trajectories) / turns,
        "rollout/turn_length_max": float(max(max(t.turn_lengths) for t in trajectories)),
        "rollout/observation_length": sum(t.observation_length for t in trajectories) / count,
    }


class Collector:
    """Samples and scores rollouts of `prompts` groups of `samples`.

    Rollouts come from `rollouts`. take: returns the next prompts of the data. score: as `Scoring.score`. rounds: how
    often groups without differences may be sampled again; None if they are not. greedy_answers: score one for each
    prompt. doing: is told what begins.
    """

    def __init__(
        self,
        take: Callable[[int], list[Prompt]],
        rollouts: TrajectorySource,
        score: Callable[..., Scores],
        *,
        prompts: int,
        samples: int,
        rounds: int | None,
        greedy_answers: bool,
        doing: Callable[[str], None] = lambda what: None,
    ) -> None:
        self.take, self.rollouts, self.score = take, rollouts, score
        self.prompts, self.samples, self.rounds, self.greedy_answers = prompts, samples, rounds, greedy_answers
        self.doing = doing

    def collect(self, prompts: list[Prompt], step: int, made: int | None = None) -> ScoredRollout:
        """prompts: the first ones, as `take` gave them; with dynamic sampling more are taken.

        step: the next one; the noise of sampling follows from it. made: optimizer steps behind the weights that sample;
        None is all before `step`. Raises TrainingError where dynamic sampling finds too few groups.
        """
        self._made = step - 1 if made is None else made
        self._rollout_s = self._reward_s = 0.0
        rejected = greedy = NO_ROLLOUT
        if self.rounds is None:
            trajectories, scores = self._sample(prompts, self.samples, step=step)
            sampled = list(range(len(trajectories)))
        else:
            (trajectories, scores), rejected, sampled = self._with_signal(prompts, step, self.rounds)
        kept = [t.prompt for t in trajectories[:: self.samples]]
        baselines_S = None
        if self.greedy_answers:
            greedy = self._sample(kept, 1, step=step, greedy=True, series="baseline")
            baselines_S = _baselines(greedy[1], self.samples)
        groups_S = torch.arange(len(kept)).repeat_interleave(self.samples)
        return ScoredRollout(
            trajectories, scores, groups_S, baselines_S, rejected, greedy, sampled, self._rollout_s, self._reward_s
        )

    def _sample(
        self, prompts: Sequence[Prompt], samples: int, *, step: int, **how: Any
    ) -> tuple[list[Trajectory], Scores]:
        began_s = time.perf_counter()
        self.doing(f"step {step}: sampling")
        trajectories = self.rollouts.sample(prompts, samples=samples, step=step, made=self._made, **how)
        sampled_s = time.perf_counter()
        self.doing(f"step {step}: scoring")
        scores = self.score(trajectories, step=step, made=step - 1)
        self._rollout_s += sampled_s - began_s + self.rollouts.earlier_s
        self._reward_s += time.perf_counter() - sampled_s
        return trajectories, scores

    def _with_signal(
        self, prompts: Sequence[Prompt], step: int, rounds: int
    ) -> tuple[tuple[list[Trajectory], Scores], tuple[list[Trajectory], Scores], list[int]]:
        """DAPO's dynamic sampling (Yu 2025, eq. 11): groups whose rewards are all equal give way to other prompts'.

        Returns what is kept, what was rejected, and `ScoredRollout.sampled`.
        """
        kept: list[tuple[list[Trajectory], Scores]] = []
        rejected: list[tuple[list[Trajectory], Scores]] = []
        kept_at: list[int] = []
        rejected_at: list[int] = []
        count = 0
        for number in range(rounds):
            trajectories, scores = self._sample(prompts, self.samples, step=step, round=number)
            totals_S = torch.tensor(scores.totals, dtype=torch.float64)
            groups_S = torch.arange(len(prompts)).repeat_interleave(self.samples)
            good_S = groups_with_signal(totals_S, groups_S)
            for parts, places, chosen_S in ((kept, kept_at, good_S), (rejected, rejected_at, ~good_S)):
                indices = chosen_S.nonzero()[:, 0].tolist()
                parts.append(([trajectories[i] for i in indices], scoring.select(scores, indices)))
                places += [count + i for i in indices]
            count += len(trajectories)
            missing = self.prompts - sum(len(part) for part, _ in kept) // self.samples
            if not missing:
                sampled = sorted(range(count), key=[*kept_at, *rejected_at].__getitem__)
                return _joined(kept), _joined(rejected), sampled
            if number + 1 < rounds:
                prompts = self.take(missing)
        failed = sum(len(part) for part, _ in rejected) // self.samples
        raise TrainingError(
            "algorithm.max_sampling_rounds",
            why=f"{rounds} rounds found {self.prompts - missing} of {self.prompts} prompts whose completions have "
            f"different rewards ({failed} had one reward for all {self.samples})",
            fix="the task may be too hard or too easy for the model: give more rounds or samples_per_prompt, other "
            "prompts, or set algorithm.dynamic_sampling to false",
        )


NO_ROLLOUT: tuple[list[Trajectory], Scores] = ([], Scores((), {}))


def _joined(parts: Sequence[tuple[list[Trajectory], Scores]]) -> tuple[list[Trajectory], Scores]:
    """Several rounds, one after another."""
    return [t for trajectories, _ in parts for t in trajectories], scoring.joined([scores for _, scores in parts])
