"""The reward of a trajectory: reward functions, a reward model and an environment, added up."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import threading
from collections.abc import Callable, Mapping, Sequence

from mrl.config.rewards import ENVIRONMENT, REWARD_MODEL, RewardsConfig
from mrl.config.roles import rewrite_role_error_keys
from mrl.data.tokenizer import load_tokenizer
from mrl.engine.collective import OnMain
from mrl.rewards.calls import Position, Sample
from mrl.rewards.scorer import Scorer, Scores
from mrl.rewards.text import Row
from mrl.roles.frozen import RewardModel
from mrl.rollout.base import Trajectory
from mrl.trainers.trainer import Trainer


class Scoring:
    """All that rewards trajectories. Functions run on the main process only, in a pool of processes of its own.

    rewards: the functions; None for none. reports: the folder of their faults' reports; None for no reports. on_main:
    as BaseEngine.on_main. The reward model's scores count `weight` times. total_steps: optimizer steps of the run.
    first: the first row of each source of the data, with its file and line. say: shows a line to the user. Raises
    ConfigError on every rank if a function cannot be loaded, or names a field that one of the rows lacks.
    """

    def __init__(
        self,
        rewards: RewardsConfig | None,
        *,
        reports: pathlib.Path | None,
        on_main: OnMain,
        first: Sequence[tuple[Row, str]],
        say: Callable[[str], None],
        reward_model: RewardModel | None = None,
        weight: float = 1.0,
        total_steps: int = 0,
    ) -> None:
        self.rewards, self.on_main, self.reward_model, self.weight = rewards, on_main, reward_model, weight
        self.total_steps, self.say = total_steps, say
        self._scorer: Scorer | None = None
        self._one_at_a_time = threading.Lock()  # rollouts that are sampled at the same time
        if rewards is not None:
            samples = [Sample("", "", *each) for each in first]
            on_main(lambda: self._start(rewards, reports, samples))

    def _start(self, rewards: RewardsConfig, reports: pathlib.Path | None, first: Sequence[Sample]) -> None:
        self._scorer = Scorer(rewards, reports=reports, first=first)

    def close(self) -> None:
        """Ends the pool. May be called twice."""
        if self._scorer is not None:
            self._scorer.close()
            self._scorer = None

    def score(self, trajectories: Sequence[Trajectory], *, step: int, made: int) -> Scores:
        """Returns what is the same on every rank. Collective. totals: weighted sums. parts: unweighted, by label.

        step: the number in the name of their file in samples/. made: optimizer steps made.

        Raises RewardError for a function's fault, and where a reward model gives no finite number.
        """
        scores = self.on_main(lambda: self._by_functions(trajectories, Position(step, made, self.total_steps)))
        return self.by_models(scores, trajectories)

    def on_this_process(self, trajectories: Sequence[Trajectory], *, step: int, made: int) -> Scores:
        """Scores as `score` does, on the main process alone and in any thread. `by_models` is left if there is a reward
        model."""
        scores = self._by_functions(trajectories, Position(step, made, self.total_steps))
        return scores if self.reward_model is not None else self.by_models(scores, trajectories)

    def by_models(self, scores: Scores, trajectories: Sequence[Trajectory]) -> Scores:
        """Adds the reward model's scores and the environment's rewards to those of the functions. Collective."""
        if self.reward_model is not None:
            values = self.reward_model.score(trajectories)
            scores = _plus(scores, REWARD_MODEL, values, self.weight)
        if any(t.reward is not None for t in trajectories):
            scores = _plus(scores, ENVIRONMENT, [t.reward or 0.0 for t in trajectories], 1.0)
        return scores

    def accuracy_of(self, scores: Scores) -> Sequence[float]:
        """Returns the values behind `eval/accuracy`: those of the first reward function, or the totals if there is
        none."""
        return next(iter(scores.parts.values())) if self.rewards is not None else scores.totals

    def _by_functions(self, trajectories: Sequence[Trajectory], position: Position) -> Scores:
        if self.rewards is None:
            return Scores((0.0,) * len(trajectories), {})
        scorer = self._scorer
        assert scorer is not None, "on the main process it lives from the start to `close`"
        groups = itertools.accumulate(t.sample == 0 for t in trajectories)
        samples = [_sample(*both) for both in zip(trajectories, groups, strict=True)]
        with self._one_at_a_time:
            try:
                return scorer.score(samples, position)
            finally:
                if again := scorer.made_again:
                    calls = "1 call was" if len(again) == 1 else f"{len(again):,} calls were"
                    self.say(f"rewards.retries: {calls} made again; the first one {again[0]}")


def scoring_of(trainer: Trainer, folders: Mapping[str, str], first: Sequence[tuple[Row, str]]) -> Scoring:
    """Returns what rewards trajectories, with its functions started. It ends with the trainer.

    folders: of the roles. first: as of `Scoring`.
    """
    config, dispatch, console, reward_model = trainer.config, trainer.dispatch, trainer.console, None
    if "reward" in folders:
        with rewrite_role_error_keys(config, "reward"):
            tokenizer = load_tokenizer(folders["reward"], config.actor.model.trust_remote_code)
        reward_model = RewardModel(dispatch, tokenizer, system=config.data.system)
    console.doing("starting the reward functions")
    scores = Scoring(
        config.rewards, reports=trainer.directory.path / "failed", on_main=dispatch.on_main, say=console.say,
        first=first, reward_model=reward_model, weight=config.reward.weight, total_steps=trainer.total_steps,
    )  # fmt: skip
    trainer.closing.callback(scores.close)
    return scores


def select(scores: Scores, indices: Sequence[int]) -> Scores:
    """Returns the scores of the samples at `indices`, with all faults."""
    parts = {label: tuple(values[i] for i in indices) for label, values in scores.parts.items()}
    return Scores(tuple(scores.totals[i] for i in indices), parts, scores.faults)


def joined(scores: Sequence[Scores]) -> Scores:
    """Several lists of samples, one after another."""
    parts: Mapping[str, tuple[float, ...]] = {
        label: tuple(value for part in scores for value in part.parts[label]) for label in scores[0].parts
    }
    totals = tuple(total for part in scores for total in part.totals)
    return Scores(totals, parts, tuple(fault for part in scores for fault in part.faults))


def _plus(scores: Scores, label: str, values: Sequence[float], weight: float) -> Scores:
    totals = tuple(total + weight * value for total, value in zip(scores.totals, values, strict=True))
    return dataclasses.replace(scores, totals=totals, parts={**scores.parts, label: tuple(values)})


def _sample(trajectory: Trajectory, group: int) -> Sample:
    prompt = trajectory.prompt
    return Sample(
        prompt.content, trajectory.text, prompt.row, prompt.where, tokens=trajectory.tokens[len(prompt.tokens) :],
        finished=trajectory.finished, turns=trajectory.turns, conversation=trajectory.conversation, group=group,
    )  # fmt: skip
