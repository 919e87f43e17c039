"""Evaluation of the policy on held-out prompts: greedy answers, or the best of k sampled ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from mrl.data.prompts import Prompt
from mrl.rewards.scorer import Scores
from mrl.rollout.base import Trajectory, TrajectorySource
from mrl.trainers.rl import scoring
from mrl.trainers.rl.scoring import Scoring


class Evaluation:
    """Evaluates on `prompts`, as often as it is asked for.

    rollouts: give the trajectories. samples: completions of each prompt; one is greedy. prompts_at_once: that are
    sampled together. doing: is told how far it is. stop_requested: collective; asked between parts of the evaluation.
    seen: called with (step, trajectories, scores) of a whole evaluation.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        rollouts: TrajectorySource,
        scores: Scoring,
        *,
        samples: int,
        prompts_at_once: int,
        doing: Callable[[str], None],
        stop_requested: Callable[[], bool],
        seen: Callable[[int, list[Trajectory], Scores], None],
    ) -> None:
        self.prompts, self.rollouts, self.scores = prompts, rollouts, scores
        self.samples, self.prompts_at_once = samples, prompts_at_once
        self.doing, self.stop_requested, self.seen = doing, stop_requested, seen

    def run(self, step: int) -> dict[str, float] | None:
        """Returns metrics after `step`. None where a signal came first.

        eval/accuracy is the mean over prompts of the best completion's value of the first reward function (of the
        total, where there is no function): with one greedy completion the accuracy, with k sampled ones pass@k.
        """
        began_s, k = time.perf_counter(), self.samples
        trajectories: list[Trajectory] = []
        scores: list[Scores] = []
        for start in range(0, len(self.prompts), self.prompts_at_once):
            if self.stop_requested():
                return None
            self.doing(f"evaluating: {start} of {len(self.prompts)} prompts are answered")
            part = self.prompts[start : start + self.prompts_at_once]
            sampled = self.rollouts.sample(part, step=step, samples=k, greedy=k == 1, series="eval")
            scores.append(self.scores.score(sampled, step=step, made=step))
            trajectories += sampled
        whole = scoring.joined(scores)
        self.seen(step, trajectories, whole)
        values = self.scores.accuracy_of(whole)
        best = [max(values[i : i + k]) for i in range(0, len(values), k)]
        return {
            "eval/accuracy": sum(best) / len(best),
            "eval/reward": sum(whole.totals) / len(whole.totals),
            "eval/faults": len(whole.faults),
            "eval/response_length": sum(t.response_length for t in trajectories) / len(trajectories),
            "perf/eval_s": time.perf_counter() - began_s,
        }
