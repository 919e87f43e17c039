"""The rewards of a run: each sample is scored by every configured function, and the total is the weighted sum."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence

from mrl.config.rewards import FunctionReward, MathReward, RegexReward, Reward, RewardsConfig, label_of
from mrl.errors import RewardError
from mrl.rewards.calls import START, Position, Sample, Scope
from mrl.rewards.pool import Outcome, Retries, RewardPool, Task

MAX_REPORTED = 3  # faults of one step that are written to a file
REPORTS = 20  # files of faults that count as 0


@dataclasses.dataclass(frozen=True)
class Scores:
    """The rewards of samples."""

    totals: tuple[float, ...]  # a weighted sum for each sample
    parts: Mapping[str, tuple[float, ...]]  # label -> unweighted, one for each sample
    faults: tuple[str, ...] = ()  # calls that counted as 0, a line each


def is_binary(values: Sequence[float]) -> bool:
    """Returns whether all values are 0 or 1: their mean is then a share, and reads as percent."""
    return all(value in (0, 1) for value in values)


class Scorer:
    """Holds the pool of processes that score.

    - reports: the folder for faults, with completion and traceback; None: they are not written
    - first: samples with the first row of each source of the data

    Raises ConfigError if a function cannot be loaded. If faults stop the run, it also does for a function that names a
    field missing in one of the `first` rows.
    """

    def __init__(
        self,
        config: RewardsConfig,
        reports: pathlib.Path | None = None,
        first: Sequence[Sample] = (),
    ) -> None:
        self.config, self.reports = config, reports
        self.labels = tuple(label_of(reward) for reward in config.functions)
        self._pool = RewardPool(
            [(f"rewards.functions[{i}]", reward) for i, reward in enumerate(config.functions)],
            workers=config.workers, timeout_s=config.timeout_s, concurrency=config.concurrency,
            retries=Retries(config.retries, config.retry_wait_s), first=first if config.checks_first_rows else (),
        )  # fmt: skip

    def close(self) -> None:
        """Ends the processes."""
        self._pool.close()

    @property
    def made_again(self) -> tuple[str, ...]:
        """Faults in the latest `score` that a retry followed."""
        return self._pool.made_again

    def score(self, samples: Sequence[Sample], position: Position = START) -> Scores:
        """Returns the rewards of `samples`, in their order.

        Raises RewardError for the first fault (by sample, then function), unless `on_error` is zero.
        """
        places, tasks = self._tasks(samples)
        outcomes = self._pool.run(tasks, position=position, fatal=self._is_fatal)
        faults: list[str] = []
        reports: list[str] = []
        values = [[0.0] * len(samples) for _ in self.config.functions]
        for place, task, outcome in zip(places, tasks, outcomes, strict=True):
            assert outcome is not None, f"task {len(faults)} of {len(tasks)} has no outcome and no fault came before it"
            if outcome.fault is not None:
                line = self._in_words(task, outcome.fault)
                fatal = self._is_fatal(task, outcome)
                if fatal or len(reports) < MAX_REPORTED:
                    reports.append(_report(line, task, outcome))
                if fatal:
                    raise RewardError(self._advice(line, outcome, self._write(reports, position, fatal=True)))
                faults.append(f"{line}; counts as 0")
            else:
                assert outcome.values is not None, f"{self.labels[task.function]}: no values and no fault"
                values[task.function][place : place + len(task.samples)] = outcome.values
        if reports:
            self._write(reports, position, fatal=False)
        return Scores(self._totals(values), dict(zip(self.labels, map(tuple, values), strict=True)), tuple(faults))

    def _tasks(self, samples: Sequence[Sample]) -> tuple[list[int], list[Task]]:
        """Returns the position of each call's first sample, and the calls, sorted by it and then by function."""
        bare = [dataclasses.replace(sample, tokens=()) if sample.tokens else sample for sample in samples]
        tasks: list[tuple[int, Task]] = []
        for function, kind in enumerate(self._pool.kinds):
            given, place = samples if kind.needs_tokens else bare, 0
            for part in _parts(given, kind.scope):
                tasks.append((place, Task(function, part)))
                place += len(part)
        tasks.sort(key=lambda item: (item[0], item[1].function))
        return [place for place, _ in tasks], [task for _, task in tasks]

    def _advice(self, line: str, outcome: Outcome, report: pathlib.Path | None) -> str:
        raised = "its traceback and the completion are" if outcome.traceback else "the completion is"
        kept = "" if report is None else f"; {raised} in {report}"
        time_too = "raise rewards.timeout_s, " if outcome.timed_out else ""
        return f"{line}; correct it, {time_too}or set rewards.on_error: zero{kept}"

    def _write(self, reports: Sequence[str], position: Position, *, fatal: bool) -> pathlib.Path | None:
        """Returns the file of a step's faults; None if there is to be none."""
        if self.reports is None or not (fatal or len(list(self.reports.glob("reward_step_*.txt"))) < REPORTS):
            return None
        self.reports.mkdir(parents=True, exist_ok=True)
        path = self.reports / f"reward_step_{position.step}.txt"
        path.write_text("\n\n".join(reports), encoding="utf-8", errors="backslashreplace")
        return path

    def _totals(self, values: Sequence[Sequence[float]]) -> tuple[float, ...]:
        weights = [reward.weight for reward in self.config.functions]
        return tuple(sum(w * v for w, v in zip(weights, row, strict=True)) for row in zip(*values, strict=True))

    def _is_fatal(self, task: Task, outcome: Outcome) -> bool:
        return self.config.on_error == "stop" and not (
            outcome.timed_out and _completion_decides_time(self.config.functions[task.function])
        )

    def _in_words(self, task: Task, fault: str) -> str:
        reward = self.config.functions[task.function]
        key = f"rewards.functions[{task.function}]"
        name = f"{key}.function: {reward.function}" if isinstance(reward, FunctionReward) else f"{key}: {reward.name}"
        where, others = task.samples[0].where, len(task.samples) - 1
        return f"{name}: row {where}{f' and {others} more samples' if others else ''}: {fault}"


def _parts(samples: Sequence[Sample], scope: Scope) -> list[tuple[Sample, ...]]:
    """Returns the samples of each call."""
    if scope == "sample":
        return [(sample,) for sample in samples]
    if scope == "batch":
        return [tuple(samples)] if samples else []
    return [tuple(group) for _, group in itertools.groupby(samples, key=lambda sample: sample.group)]


def _report(line: str, task: Task, outcome: Outcome) -> str:
    """Returns a report that shows a person why a call failed; of a call for many samples the first ones."""
    shown = [
        f"row: {json.dumps(s.row, ensure_ascii=False, default=repr)[:10_000]}\n"
        f"prompt: {json.dumps(s.prompt, ensure_ascii=False, default=repr)[:10_000]}\ncompletion:\n{s.completion}"
        for s in task.samples[:8]
    ]
    return "\n\n".join([line, outcome.traceback, *shown] if outcome.traceback else [line, *shown])


def _completion_decides_time(reward: Reward) -> bool:
    """Returns whether a completion can make the reward hang with no one at fault; its timeout is then a wrong answer.

    Examples are a regex that backtracks, and an expression such as 9**9**9**9.
    """
    return isinstance(reward, RegexReward | MathReward)


def faults_in_words(faults: Sequence[str]) -> list[str]:
    """Returns lines for the console: the first faults, and the number of others."""
    rest = len(faults[3:])
    return [*faults[:3], *([f"other faults of rewards, each of which counts as 0: {rest:,}"] if rest else [])]


def metrics(scores: Scores) -> dict[str, float]:
    """Returns the metrics of all samples of a step; empty without samples.

    They are `reward/mean`, `std` (the population's), `min` and `max` of the totals, and mean and std by label
    (`reward/gsm8k/mean`). `reward/faults` is how many calls counted as 0.
    """
    if not scores.totals:
        return {}
    out = {"reward/faults": float(len(scores.faults))}
    for name, values in {"reward": scores.totals, **{f"reward/{k}": v for k, v in scores.parts.items()}}.items():
        out[f"{name}/mean"] = statistics.fmean(values)
        out[f"{name}/std"] = statistics.pstdev(values)
    return out | {"reward/min": min(scores.totals), "reward/max": max(scores.totals)}
