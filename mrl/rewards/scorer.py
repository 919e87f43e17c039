"""The rewards of a run: each sample is scored by every configured function, and the total is the weighted sum."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from mrl.config.rewards import FunctionReward, MathReward, RegexReward, Reward, RewardsConfig, label_of
from mrl.errors import RewardError
from mrl.rewards.pool import Outcome, RewardPool, Task
from mrl.rewards.text import Prompt, Row


@dataclasses.dataclass(frozen=True)
class Sample:
    """What is scored. prompt: text or messages. where: the row's file and line, `train.jsonl:17`, for errors."""

    prompt: Prompt
    completion: str
    row: Row
    where: str


@dataclasses.dataclass(frozen=True)
class Scores:
    """totals: a number per sample. parts: the same, unweighted, by label. faults: those that counted as 0, a line each."""

    totals: tuple[float, ...]
    parts: Mapping[str, tuple[float, ...]]
    faults: tuple[str, ...] = ()


class Scorer:
    """Holds the pool of processes that score. `path`: where in the config `config` was written. Raises ConfigError where a
    function cannot be loaded."""

    def __init__(self, config: RewardsConfig, path: str = "rewards") -> None:
        self.config = config
        self.path = path
        self.labels = tuple(label_of(reward) for reward in config.functions)
        self._pool = RewardPool(
            [(f"{path}.functions[{i}]", reward) for i, reward in enumerate(config.functions)],
            workers=config.workers, timeout_s=config.timeout_s, concurrency=config.concurrency,
        )  # fmt: skip

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes."""
        self._pool.close()

    def score(self, samples: Sequence[Sample]) -> Scores:
        """The rewards of `samples`, in their order. Raises RewardError for the first fault (by sample, then function), unless
        `on_error` is zero."""
        count = len(self.config.functions)
        tasks = [Task(f, s.prompt, s.completion, s.row) for s in samples for f in range(count)]
        outcomes = self._pool.run(tasks, fatal=self._is_fatal)
        faults: list[str] = []
        values: list[list[float]] = [[] for _ in range(count)]
        for i, (task, outcome) in enumerate(zip(tasks, outcomes, strict=True)):
            assert outcome is not None, f"task {i} of {len(tasks)} has no outcome and no fault came before it"
            if outcome.fault is not None:
                line = self._in_words(task.function, samples[i // count].where, outcome.fault)
                if self._is_fatal(task, outcome):
                    raise RewardError(f"{line}; correct it, or set {self.path}.on_error: zero")
                faults.append(f"{line}; counts as 0")
            values[task.function].append(0.0 if outcome.value is None else outcome.value)
        return Scores(self._totals(values), dict(zip(self.labels, map(tuple, values), strict=True)), tuple(faults))

    def _totals(self, values: Sequence[Sequence[float]]) -> tuple[float, ...]:
        weights = [reward.weight for reward in self.config.functions]
        return tuple(sum(w * v for w, v in zip(weights, row, strict=True)) for row in zip(*values, strict=True))

    def _is_fatal(self, task: Task, outcome: Outcome) -> bool:
        return self.config.on_error == "stop" and not (
            outcome.timed_out and _completion_decides_time(self.config.functions[task.function])
        )

    def _in_words(self, function: int, where: str, fault: str) -> str:
        reward = self.config.functions[function]
        key = f"{self.path}.functions[{function}]"
        name = f"{key}.function: {reward.function}" if isinstance(reward, FunctionReward) else f"{key}: {reward.name}"
        return f"{name}: row {where}: {fault}"


def _completion_decides_time(reward: Reward) -> bool:
    """Whether a completion can make the reward hang with no one at fault, so that its timeout is a wrong answer: a regex
    that backtracks, an expression such as 9**9**9**9."""
    return isinstance(reward, RegexReward | MathReward)


def faults_in_words(faults: Sequence[str], most: int = 3) -> list[str]:
    """Lines for the console: the first faults, and how many more there were."""
    rest = len(faults) - most
    what = "fault of rewards, which counts as 0" if rest == 1 else "faults of rewards, which count as 0"
    more = [f"and {rest:,} more {what}"] if rest > 0 else []
    return [*faults[:most], *more]


def metrics(scores: Scores) -> dict[str, float]:
    """`reward/mean` and `reward/std` of the totals, the same by label (`reward/gsm8k/mean`), `reward/faults`: how many
    counted as 0. std is the population's. Of all samples of a step; empty without samples."""
    if not scores.totals:
        return {}
    out = {"reward/faults": float(len(scores.faults))}
    for name, values in {"reward": scores.totals, **{f"reward/{k}": v for k, v in scores.parts.items()}}.items():
        out[f"{name}/mean"] = statistics.fmean(values)
        out[f"{name}/std"] = statistics.pstdev(values)
    return out
