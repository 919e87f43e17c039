"""Evaluation of the policy on held-out prompts, in one set or several by name: greedy answers, or the best of k sampled
ones."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence

from mrl.data.dataset import RowDataset
from mrl.data.prompts import Prompt, first_prompts
from mrl.data.stream import Report
from mrl.rewards.scorer import Scores, faults_in_words, is_binary
from mrl.rollout.base import Trajectory, TrajectorySource
from mrl.rollout.samples import bound, write_samples
from mrl.trainers.common import say_all, say_left_out
from mrl.trainers.rl import scoring
from mrl.trainers.rl.scoring import Scoring
from mrl.trainers.trainer import Trainer


class Evaluation:
    """Evaluates on `sets` of prompts, as often as it is asked for.

    sets: by name, or "" for the only one. No two prompts have one index. Trajectories come from `rollouts`. samples:
    completions of each prompt; one is greedy. prompts_at_once: prompts of one call. doing: is told how far it is.
    stop_requested: is asked between parts of the evaluation; collective. The callback `seen` is called with (step,
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

        eval/accuracy is a mean over prompts. A prompt counts with its best completion's value of the first reward
        function, or of the total without functions. With one greedy completion it is the accuracy, with k sampled ones
        pass@k.
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


def evaluation_of(
    trainer: Trainer, held_out: Mapping[str, RowDataset[Prompt]], rollouts: TrajectorySource, scores: Scoring
) -> Evaluation | None:
    """Returns the evaluation on the sets of data.eval, and reads all their prompts; None without."""
    if not held_out:
        return None
    config, console = trainer.config, trainer.console
    sets: dict[str, list[Prompt]] = {}
    start = 0
    for name, rows in held_out.items():
        report = Report()
        prompts = first_prompts(rows, config.train.eval_prompts, report)
        sets[name] = [dataclasses.replace(prompt, index=start + prompt.index) for prompt in prompts]
        start += len(rows)
        say_left_out(console, f"eval.{name}".rstrip("."), report.counts, report.notes)
    k = config.train.eval_samples
    size = config.prompts_per_iteration * max(1, config.rollout.samples_per_prompt // k)
    return Evaluation(
        sets, rollouts, scores, samples=k, prompts_at_once=size, doing=console.doing,
        stop_requested=lambda: trainer.stop_requested, seen=functools.partial(show_evaluation, trainer),
    )  # fmt: skip


def show_evaluation(trainer: Trainer, step: int, trajectories: Sequence[Trajectory], scores: Scores) -> None:
    """Writes the answers to held-out prompts after `step`, and says which rewards failed on them."""
    wanted, folder = trainer.config.log.samples, str(trainer.directory.samples)

    def write() -> None:
        write_samples(
            folder, step, trajectories, series="eval", rewards=scores.totals, parts=scores.parts,
            tokens=wanted.tokens, compress=wanted.compress,
        )  # fmt: skip
        bound(folder, keep=wanted.keep, max_mb=wanted.max_mb)

    if wanted.every is not None:
        trainer.dispatch.on_main(write)
    say_all(trainer.console, faults_in_words(scores.faults))
