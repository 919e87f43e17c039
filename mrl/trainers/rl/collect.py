"""The first half of an iteration: prompts, completions, rewards; nothing is trained here.

Dimensions: `S` sequences of the rollout, prompt-major: the samples of a prompt are neighbours.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from mrl.algorithms.shaping import groups_with_signal
from mrl.data.prompts import Prompt
from mrl.errors import TrainingError
from mrl.rewards.scorer import Scores
from mrl.rollout.base import Trajectory
from mrl.trainers.rl import scoring
from mrl.trainers.rl.scoring import Scoring


@dataclasses.dataclass(frozen=True)
class Collected:
    """A rollout with its rewards. groups_S: int64, which prompt of the rollout each sequence answers. baselines_S: fp64,
    the reward of the greedy answer to each sequence's prompt, where the algorithm has it. rejected: groups that were
    sampled anew. sampled_tokens: in all, also of those."""

    trajectories: list[Trajectory]
    scores: Scores
    groups_S: Tensor
    baselines_S: Tensor | None
    rejected: int
    sampled_tokens: int
    rollout_s: float
    reward_s: float

    @property
    def scores_S(self) -> Tensor:
        return torch.tensor(self.scores.totals, dtype=torch.float64)

    def metrics(self) -> dict[str, float]:
        """`reward/...` and `rollout/...` of the trajectories that are trained on, but tokens per second of all that were sampled."""
        lengths = [t.response_length for t in self.trajectories]
        return {
            **scoring.metrics(self.scores),
            "rollout/response_length": sum(lengths) / len(lengths),
            "rollout/finished": sum(t.finished for t in self.trajectories) / len(lengths),
            "rollout/tokens_per_s": self.sampled_tokens / self.rollout_s,
            "rollout/prompts_rejected": float(self.rejected),
        }


class Collector:
    """Samples and scores rollouts of `prompts` groups of `samples`.

    rollouts: has `sample(prompts, step=, samples=, greedy=)`. source: has `take(count)`. rounds: how often groups without
    differences may be sampled anew; None where they are not. greedy_answers: whether to score one for each prompt.
    """

    def __init__(
        self, source, rollouts, scores: Scoring, *, prompts: int, samples: int, rounds: int | None, greedy_answers: bool
    ) -> None:
        self.source, self.rollouts, self.scores = source, rollouts, scores
        self.prompts, self.samples, self.rounds, self.greedy_answers = prompts, samples, rounds, greedy_answers

    def collect(self, prompts: list[Prompt], step: int) -> Collected:
        """prompts: the first ones, as `source.take` gave them; with dynamic sampling more are taken from the source.

        step: what the noise of sampling follows from. Raises TrainingError where dynamic sampling finds too few groups.
        """
        self._rollout_s, self._reward_s, self._sampled_tokens, rejected = 0.0, 0.0, 0, 0
        trajectories, scores = self._sample(prompts, step, self.samples)
        if self.rounds is not None:
            trajectories, scores, rejected = self._with_signal(trajectories, scores, step)
        kept = [t.prompt for t in trajectories[:: self.samples]]
        baselines_S = None
        if self.greedy_answers:
            _, greedy = self._sample(kept, step, 1, greedy=True)
            baselines_S = torch.tensor(greedy.totals, dtype=torch.float64).repeat_interleave(self.samples)
        groups_S = torch.arange(len(kept)).repeat_interleave(self.samples)
        tokens = self._sampled_tokens
        return Collected(trajectories, scores, groups_S, baselines_S, rejected, tokens, self._rollout_s, self._reward_s)

    def _sample(
        self, prompts: Sequence[Prompt], step: int, samples: int, greedy: bool = False
    ) -> tuple[list[Trajectory], Scores]:
        began_s = time.perf_counter()
        trajectories = self.rollouts.sample(prompts, step=step, samples=samples, greedy=greedy)
        sampled_s = time.perf_counter()
        scores = self.scores.score(trajectories)
        self._rollout_s += sampled_s - began_s
        self._reward_s += time.perf_counter() - sampled_s
        self._sampled_tokens += sum(t.response_length for t in trajectories)
        return trajectories, scores

    def _with_signal(
        self, trajectories: list[Trajectory], scores: Scores, step: int
    ) -> tuple[list[Trajectory], Scores, int]:
        """DAPO's dynamic sampling (Yu 2025, eq. 11): groups whose rewards are all equal give way to other prompts'."""
        kept, kept_scores, rejected = [], [], 0
        for number in range(1, self.rounds + 1):
            totals_S = torch.tensor(scores.totals, dtype=torch.float64)
            groups_S = torch.arange(len(totals_S) // self.samples).repeat_interleave(self.samples)
            good = groups_with_signal(totals_S, groups_S).nonzero()[:, 0].tolist()
            kept += [trajectories[i] for i in good]
            kept_scores.append(scoring.select(scores, good))
            rejected += (len(trajectories) - len(good)) // self.samples
            missing = self.prompts - len(kept) // self.samples
            if not missing:
                return kept, scoring.joined(kept_scores), rejected
            if number < self.rounds:
                trajectories, scores = self._sample(self.source.take(missing), step, self.samples)
        raise TrainingError(
            f"algorithm.max_sampling_rounds: {self.rounds} rounds found {self.prompts - missing} of {self.prompts} prompts whose completions "
            f"have different rewards ({rejected} had one reward for all {self.samples}); the task may be too hard or too easy for the "
            "model: give more rounds or samples_per_prompt, other prompts, or set algorithm.dynamic_sampling to false"
        )
