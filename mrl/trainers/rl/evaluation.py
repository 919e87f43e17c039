"""Evaluation of the policy on held-out prompts, in one set or several by name: greedy answers, or the best of k sampled
ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from mrl.data.prompts import Prompt
from mrl.rewards.scorer import Scores, is_binary
from mrl.rollout.base import Trajectory, TrajectorySource
from mrl.trainers.rl import scoring
from mrl.trainers.rl.scoring import Scoring


class Evaluation:
    """Evaluates on `sets` of prompts, as often as it is asked for.

    sets: by name, "" where there is one alone; no two prompts have one index. rollouts: give the trajectories.
    samples: completions of each prompt; one is greedy. prompts_at_once: that are sampled together. doing: is told how
    far it is. stop_requested: collective; asked between parts of the evaluation. seen: called with (step,
    trajectories, scores) of a whole evaluation.
    """

    def __init__(
        self,
        sets: Mapping[str, Sequence[Prompt]],
        rollouts: TrajectorySource,
        scores: Scoring,
        *,
        samples: int,
        prompts_at_once: int,
        doing: Callable[[str], None],
        stop_requested: Callable[[], bool],
        seen: Callable[[int, list[Trajectory], Scores], None],
    ) -> None:
        self.sets, self.rollouts, self.scores = sets, rollouts, scores
        self.samples, self.prompts_at_once = samples, prompts_at_once
        self.doing, self.stop_requested, self.seen = doing, stop_requested, seen

    def run(self, step: int) -> dict[str, float] | None:
        """Returns metrics after `step`: of all sets together, and of each that has a name. None where a signal came
        first.

        eval/accuracy is the mean over prompts of the best completion's value of the first reward function (of the
        total, where there is no function): with one greedy completion the accuracy, with k sampled ones pass@k.
        """
        began_s, every = time.perf_counter(), [prompt for prompts in self.sets.values() for prompt in prompts]
        trajectories: list[Trajectory] = []
        scores: list[Scores] = []
        for start in range(0, len(every), self.prompts_at_once):
            if self.stop_requested():
                return None
            self.doing(f"evaluating: {start} of {len(every)} prompts are answered")
            part = every[start : start + self.prompts_at_once]
            sampled = self.rollouts.sample(
                part, step=step, samples=self.samples, greedy=self.samples == 1, series="eval"
            )
            scores.append(self.scores.score(sampled, step=step, made=step))
            trajectories += sampled
        whole = scoring.joined(scores)
        self.seen(step, trajectories, whole)
        metrics = {f"eval/{name}": value for name, value in self._measured(trajectories, whole).items()}
        if whole.parts:
            metrics["eval/binary"] = float(is_binary(self.scores.accuracy_of(whole)))
        end = 0
        for of, prompts in self.sets.items():
            start, end = end, end + len(prompts) * self.samples
            own = self._measured(trajectories[start:end], scoring.select(whole, range(start, end))) if of else {}
            metrics |= {f"eval/{of}/{name}": value for name, value in own.items()}
        return metrics | {"eval/faults": len(whole.faults), "perf/eval_s": time.perf_counter() - began_s}

    def _measured(self, trajectories: Sequence[Trajectory], scores: Scores) -> dict[str, float]:
        """Returns means over prompts, prompt-major; of rewards where there are any."""
        length = {"response_length": sum(t.response_length for t in trajectories) / len(trajectories)}
        if not scores.parts:
            return length
        values, k = self.scores.accuracy_of(scores), self.samples
        best = [max(values[i : i + k]) for i in range(0, len(values), k)]
        return {
            "accuracy": sum(best) / len(best),
            "reward": sum(scores.totals) / len(scores.totals),
        } | length
