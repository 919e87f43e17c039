"""The section `rewards`: the rewards of a completion, with their weights and options, and how they are run.

    rewards:
      functions:
        - {name: gsm8k}
        - {name: regex, pattern: "(?s).*####.*", weight: 0.1, label: format}
        - {function: my_rewards.py:politeness, weight: 0.5}
      timeout_s: 10

Each entry is one of the dataclasses below, chosen by its `name`, or a `FunctionReward`. `mrl.rewards` computes
them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal

from mrl.config.build import build_section
from mrl.config.keys import value_kind
from mrl.config.schema import MAX_DEGREE, MAX_SECONDS, REQUIRED, key
from mrl.errors import ConfigError, MistakeCollector

_WEIGHT = "factor in the total; 0 to measure only"
_LABEL = "name in the metrics; default the reward's own name"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedReward:
    """A reward that ships with mrl."""

    name: str = key(REQUIRED, "the reward")
    weight: float = key(1.0, _WEIGHT)
    label: str | None = key(None, _LABEL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExactMatchReward(NamedReward):
    name: Literal["exact_match"] = key("exact_match", "1 where the completion equals the row's field")
    field: str = key("answer", "the row's field: text, a number, or a list of them of which any will do")
    extract: str | None = key(
        None, "regex whose last match in the completion (its first group, if it has one) is compared; null for all"
    )
    ignore_case: bool = key(True, "compare without upper and lower case")
    ignore_punctuation: bool = key(False, "compare without punctuation")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegexReward(NamedReward):
    name: Literal["regex"] = key("regex", "1 where the completion matches the pattern")
    pattern: str = key(REQUIRED, "Python regex; (?s) in front lets . match a newline")
    match: Literal["full", "search"] = key("full", "the whole completion must match, or some part of it")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthReward(NamedReward):
    name: Literal["length"] = key("length", "1 between minimum and maximum, falling linearly to 0 over slack")
    unit: Literal["characters", "words"] = key("characters", "what is counted; words are split at white space")
    minimum: int = key(0, "shortest completion that gets 1", minimum=0)
    maximum: int | None = key(None, "longest completion that gets 1; null for no bound", minimum=0)
    slack: int = key(0, "units beyond a bound at which the reward has fallen to 0; 0 for at once", minimum=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GSM8KReward(NamedReward):
    name: Literal["gsm8k"] = key("gsm8k", "1 where the completion's number is the one after #### in the row's answer")
    field: str = key("answer", "the row's field: a worked answer that ends in `#### 72`, or a number alone")
    strict: bool = key(False, "only `#### 72` counts as an answer; false also takes \\boxed{72} and the last number")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MathReward(NamedReward):
    name: Literal["math"] = key("math", "1 where math-verify finds the completion's answer equal to the row's")
    field: str = key("answer", "the row's field: LaTeX or plain, an answer alone or a solution that ends in one")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodeReward(NamedReward):
    name: Literal["code"] = key("code", "the unit tests that the completion's Python block passes")
    field: str = key("tests", "the row's field: Python text, a list of Python texts, or a list of {input, output}")
    score: Literal["fraction", "all"] = key("fraction", "the fraction of tests that pass, or 1 only if all do")
    time_s: float = key(2.0, "wall and CPU time of one test", above=0, maximum=MAX_SECONDS)
    total_s: float = key(
        8.0, "wall time of all tests of a completion; tests not reached fail", above=0, maximum=MAX_SECONDS
    )
    memory_mb: int = key(1024, "address space of a test", minimum=64)
    file_mb: int = key(16, "size of a file that a test writes, its output among them", minimum=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FunctionReward:
    function: str = key(
        REQUIRED,
        "path.py:name of your (prompt, completion, row) -> number, or of one with verl's or TRL's parameters; plain or "
        "async",
    )
    weight: float = key(1.0, _WEIGHT)
    label: str | None = key(None, _LABEL)


REWARD_MODEL, ENVIRONMENT = "model", "environment"
"""Labels of what is rewarded elsewhere: by a reward model, by the environment of a conversation."""

Reward = NamedReward | FunctionReward
NAMED: Mapping[str, type] = {
    "exact_match": ExactMatchReward,
    "regex": RegexReward,
    "length": LengthReward,
    "gsm8k": GSM8KReward,
    "math": MathReward,
    "code": CodeReward,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardPoolConfig:
    """How rewards are run: the keys of `rewards` beside `functions`."""

    timeout_s: float = key(10.0, "wall time of one call of one function", above=0, maximum=MAX_SECONDS, may_change=True)
    workers: int = key(
        4, "processes that call the functions, on each rank that scores", minimum=1, maximum=1024, may_change=True
    )
    concurrency: int = key(
        16, "calls of async functions in flight in a process", minimum=1, maximum=MAX_DEGREE, may_change=True
    )
    retries: int = key(
        0,
        "how often a failed call of your own function is repeated, for judges that may be busy",
        minimum=0,
        maximum=100,
        may_change=True,
    )
    retry_wait_s: float = key(
        1.0,
        "wait before the first retry; it doubles for each next one, up to 60 s",
        above=0,
        maximum=60,
        may_change=True,
    )
    on_error: Literal["stop", "zero"] = key(
        "stop",
        "on an exception, a timeout or a value that is not finite: stop with function and row, or count it as 0",
        may_change=True,
    )

    @property
    def checks_first_rows(self) -> bool:
        """Whether the first rows are checked before a model is loaded. With `zero` a fault counts as 0."""
        return self.on_error == "stop"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardsConfig(RewardPoolConfig):
    functions: tuple[Reward, ...] = key(
        REQUIRED, "what is summed: {name: NAME} and its options, or {function: path.py:name}"
    )


def label_of(reward: Reward) -> str:
    """Returns the reward's name in the metrics."""
    if reward.label is not None:
        return reward.label
    return reward.function.rpartition(":")[2] if isinstance(reward, FunctionReward) else reward.name


def parse_rewards(raw: Any, path: str = "rewards") -> RewardsConfig:
    """Returns the section written at `path`, from plain data as YAML gives it. Raises ConfigError."""
    if not isinstance(raw, Mapping):
        raise ConfigError(path, raw, f"is {value_kind(raw)}", "give a mapping, as {functions: [{name: gsm8k}]}")
    entries, functions = raw.get("functions"), []
    rest = {name: value for name, value in raw.items() if name != "functions"}
    with MistakeCollector() as mistakes:
        with mistakes.noted():
            pool = build_section(RewardPoolConfig, rest, path, RewardPoolConfig)
        with mistakes.noted():
            if not isinstance(entries, list) or not entries:
                fix = "give a list of rewards, as [{name: gsm8k}]"
                raise ConfigError(f"{path}.functions", entries, "is no list of rewards", fix)
        for i, entry in enumerate(entries if isinstance(entries, list) else ()):
            with mistakes.noted():
                functions.append(_parse_reward(entry, f"{path}.functions[{i}]"))
    config = RewardsConfig(functions=tuple(functions), **dataclasses.asdict(pool))
    _check(config, path)
    return config


def _parse_reward(raw: Any, path: str) -> Reward:
    if not isinstance(raw, Mapping) or ("name" in raw) == ("function" in raw):
        raise ConfigError(
            path,
            raw,
            "names no reward, or two",
            f"give {{name: NAME}} of {', '.join(NAMED)}, or {{function: path.py:name}}",
        )
    if "function" in raw:
        return build_section(FunctionReward, raw, path, FunctionReward)
    if raw["name"] not in list(NAMED):
        advice = f"give one of {', '.join(NAMED)}, or a function: path.py:name"
        raise ConfigError(f"{path}.name", raw["name"], "is no named reward", advice)
    made: Reward = build_section(NAMED[raw["name"]], raw, path, NAMED[raw["name"]])
    return made


def _check(config: RewardsConfig, path: str) -> None:
    labels = [label_of(reward) for reward in config.functions]
    for i, reward in enumerate(config.functions):
        here = f"{path}.functions[{i}]"
        match reward:
            case FunctionReward():
                check_spec(reward.function, f"{here}.function", "my_rewards.py:score")
            case LengthReward(minimum=least, maximum=most) if not (least if most is None else least <= most):
                why = "has no bound, or a maximum below its minimum"
                raise ConfigError(here, why=why, fix="give bounds")
            case CodeReward() if reward.total_s >= config.timeout_s:
                raise ConfigError(
                    f"{here}.total_s",
                    reward.total_s,
                    f"does not leave time before {path}.timeout_s {config.timeout_s}",
                    "raise timeout_s or lower total_s",
                )
            case RegexReward():
                _check_regex(reward.pattern, f"{here}.pattern")
            case ExactMatchReward():
                _check_regex(reward.extract, f"{here}.extract")
        if labels[i] in labels[:i] or labels[i] in ("", "mean", "std", "faults", REWARD_MODEL, ENVIRONMENT):
            raise ConfigError(f"{here}.label", labels[i], "is taken", "give each reward a label of its own")


def check_spec(spec: str, path: str, example: str) -> None:
    """Raises ConfigError where what is written at `path` is not path.py:name; the file may not exist."""
    file, _, name = spec.rpartition(":")
    if not file or not name.isidentifier():
        raise ConfigError(path, spec, "is not path.py:name", f"write it as {example}")


def _check_regex(pattern: str | None, path: str) -> None:
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise ConfigError(path, pattern, f"is no regex: {error}", "give a Python regex") from None
