"""Evaluation of the policy on held-out prompts: greedy answers, or the best of k sampled ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from mrl.config.ppo import PPOConfig
from mrl.data.prompts import Prompt
from mrl.rewards.scorer import Scores
from mrl.rollout.base import Trajectory, TrajectorySource
from mrl.trainers.rl import scoring
from mrl.trainers.rl.scoring import Scoring


class Evaluation:
    """Evaluates on `prompts`, as often as it is asked for.

    rollouts: give the trajectories. doing: is told how far it is. stop_requested: collective; asked between parts of
    the evaluation. seen: called with (step, trajectories, scores) of a whole evaluation.
    """

    def __init__(
        self,
        config: PPOConfig,
        prompts: Sequence[Prompt],
        rollouts: TrajectorySource,
        scores: Scoring,
        *,
        doing: Callable[[str], None],
        stop_requested: Callable[[], bool],
        seen: Callable[[int, list[Trajectory], Scores], None],
    ) -> None:
        self.config, self.prompts, self.rollouts, self.scores = config, prompts, rollouts, scores
        self.doing, self.stop_requested, self.seen = doing, stop_requested, seen

    def run(self, step: int) -> dict[str, float] | None:
        """Returns metrics after `step`, on `train.eval_samples` completions of each prompt. None where a signal came
        first.

        eval/accuracy is the mean over prompts of the best completion's value of the first reward function (of the
        total, where there is no function): with one greedy completion the accuracy, with k sampled ones pass@k.
        """
        began_s, k = time.perf_counter(), self.config.train.eval_samples
        trajectories: list[Trajectory] = []
        scores: list[Scores] = []
        size = self.config.prompts_per_iteration * max(1, self.config.rollout.samples_per_prompt // k)
        for start in range(0, len(self.prompts), size):
            if self.stop_requested():
                return None
            self.doing(f"evaluating: {start} of {len(self.prompts)} prompts are answered")
            part = self.prompts[start : start + size]
            sampled = self.rollouts.sample(part, step=step, samples=k, greedy=k == 1, series="eval")
            scores.append(self.scores.score(sampled, step=step, made=step))
            trajectories += sampled
        whole = scoring.joined(scores)
        self.seen(step, trajectories, whole)
        values = scoring.accuracy_of(whole, self.config)
        best = [max(values[i : i + k]) for i in range(0, len(values), k)]
        return {
            "eval/accuracy": sum(best) / len(best),
            "eval/reward": sum(whole.totals) / len(whole.totals),
            "eval/faults": len(whole.faults),
            "eval/response_length": sum(t.response_length for t in trajectories) / len(trajectories),
            "perf/eval_s": time.perf_counter() - began_s,
        }
