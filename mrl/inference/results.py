"""The result of an evaluation, and the comparison of two on the same prompts: written as JSON, printed as a table.

Dimensions: `P` prompts, `N` samples of each.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from mrl.config.inference import EvalConfig
from mrl.config.rewards import ENVIRONMENT, FunctionReward, RewardsConfig, label_of
from mrl.data.files import BadRow
from mrl.data.formats import rename_fields
from mrl.data.rows import open_rows
from mrl.errors import ConfigError, quoted, show
from mrl.inference import statistics
from mrl.rewards.scorer import Scores
from mrl.rollout.base import Trajectory

FORMAT = 1
"""Version of the file."""

SAMPLED = (
    "rollout.samples_per_prompt", "rollout.backend", "rollout.max_new_tokens", "rollout.temperature", "rollout.top_k",
    "rollout.top_p", "rollout.min_p", "rollout.stop", "rollout.stop_tokens", "rollout.environment", "data.system",
    "data.max_prompt_length", "data.chat_template", "model.dtype",
)  # fmt: skip
"""Keys that completions follow from, beside the model, the rows and the seed."""


def rows_of(
    trajectories: Sequence[Trajectory], scores: Scores, values: Sequence[float], samples: int
) -> list[dict[str, Any]]:
    """Returns the outcome of each prompt: lists of one entry a sample. values: the ones behind the accuracy."""
    rows = []
    for start in range(0, len(trajectories), samples):
        part = range(start, start + samples)
        prompt = trajectories[start].prompt
        rows.append(
            {
                "where": prompt.where,
                "row": row_key(prompt.row),
                "values": [values[i] for i in part],
                "rewards": {label: [numbers[i] for i in part] for label, numbers in scores.parts.items()},
                "tokens": [trajectories[i].response_length for i in part],
                "finished": [trajectories[i].finished for i in part],
                "completions": [trajectories[i].text for i in part],
            }
        )
    return rows


def row_key(row: Mapping[str, Any]) -> str:
    """Returns the key that pairs a row with its equal: a hash of all its content."""
    return hashlib.sha256(json.dumps(row, sort_keys=True, default=str).encode()).hexdigest()[:16]


def reward_in_words(config: EvalConfig) -> str:
    """Returns the label of the reward that gives the accuracy."""
    return label_of(config.rewards.functions[0]) if config.rewards is not None else ENVIRONMENT


def reward_file(rewards: RewardsConfig | None) -> str | None:
    """Returns a hash of the file of a user's own reward, without what it imports."""
    first = rewards.functions[0] if rewards is not None else None
    if not isinstance(first, FunctionReward):
        return None
    return hashlib.sha256(Path(first.function.rpartition(":")[0]).read_bytes()).hexdigest()[:16]


def measures_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Returns each measure with its interval: pass@1 to pass@N, or the accuracy of greedy completions."""
    samples = len(rows[0]["values"])
    measures = {}
    for k in range(1, samples + 1):
        values_P = [statistics.pass_at_k(row["values"], k) for row in rows]
        low, high = statistics.interval(values_P)
        measures["accuracy" if samples == 1 else f"pass@{k}"] = {"value": fmean(values_P), **_bounds(low, high)}
    return measures


def _bounds(low: float, high: float) -> dict[str, float | None]:
    """Returns an interval for JSON, with null for a bound that is not finite."""
    return {"low": low if math.isfinite(low) else None, "high": high if math.isfinite(high) else None}


def totals_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the mean length of completions in tokens, and the share that a limit cut."""
    tokens = [count for row in rows for count in row["tokens"]]
    finished = [ended for row in rows for ended in row["finished"]]
    return {"length": fmean(tokens), "truncated": 1 - sum(finished) / len(finished)}


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the differences of two results on the prompts that both have, each with its interval and p-value.

    The test is McNemar's exact one if both were greedy and every value is 0 or 1. Otherwise it permutes the signs of
    the prompts' differences. Raises ConfigError if no prompt is the same.
    """
    pairs = _paired(first["rows"], second["rows"])
    if not pairs:
        raise _no_rows()
    samples = min(first["samples"], second["samples"])
    result: dict[str, Any] = {
        "prompts": len(pairs), "differ_in": _differ_in(first, second), "measures": {},
        "of_pairs": [measures_of([pair[i] for pair in pairs]) for i in (0, 1)],
    }  # fmt: skip
    for k in range(1, samples + 1):
        first_P, second_P = ([statistics.pass_at_k(pair[i]["values"], k) for pair in pairs] for i in (0, 1))
        differences_P = [a - b for a, b in zip(first_P, second_P, strict=True)]
        bounded = statistics.is_bounded([*first_P, *second_P])
        only_first, only_second = (sum(sign * gap > 0 for gap in differences_P) for sign in (1, -1))
        greedy = all(len(row["values"]) == 1 for pair in pairs for row in pair)
        exact = greedy and statistics.is_binary([*first_P, *second_P])
        if exact:
            p = statistics.mcnemar(first_P, second_P)
            low, high = statistics.binary_difference(only_first, only_second, len(pairs))
        else:
            p = statistics.sign_flips(differences_P)
            low, high = statistics.difference(differences_P, bounded=bounded)
        result["measures"][f"pass@{k}"] = {
            "difference": fmean(differences_P), **_bounds(low, high), "p": p,
            "test": "McNemar's exact test" if exact else "paired permutation of signs",
            "only_first": only_first, "only_second": only_second,
        }  # fmt: skip
    return result


def _differ_in(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Returns the keys by which the two were sampled or scored in different ways, each with both values."""
    names = [*SAMPLED, *(() if first["samples"] == second["samples"] == 1 else ("seed",))]
    values = {name: [_value(of, name) for of in (first["config"], second["config"])] for name in names}
    values["file of the reward"] = [of.get("reward_file") for of in (first, second)]
    values["reward"] = [_options(of["config"].get("rewards")) for of in (first, second)]
    return {name: both for name, both in values.items() if both[0] != both[1]}


def _options(rewards: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the keys of the first reward that decide its numbers; its file may be written in several ways."""
    first = rewards["functions"][0] if rewards is not None else {}
    return {name: value for name, value in first.items() if name not in ("weight", "label", "function")}


def _value(config: Mapping[str, Any], key: str) -> Any:
    section, _, name = key.rpartition(".")
    return (config.get(section, {}) if section else config).get(name)


def _paired(
    first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Returns the rows of both, in the order of the first; of equal rows the first goes with the first."""
    waiting: dict[str, collections.deque[Mapping[str, Any]]] = collections.defaultdict(collections.deque)
    for row in second:
        waiting[row["row"]].append(row)
    return [(row, waiting[row["row"]].popleft()) for row in first if waiting[row["row"]]]


def check_comparable(config: EvalConfig, saved: Mapping[str, Any]) -> None:
    """Raises ConfigError if a saved result has another reward, or none of the rows of this evaluation."""
    reward = reward_in_words(config)
    if saved["reward"] != reward:
        why = f"was scored by {saved['reward']}, and this is by {reward}"
        raise ConfigError("--against", why=why, fix="evaluate both by the same reward")
    known = {row["row"] for row in saved["rows"]}
    assert isinstance(config.data.eval, str), "a task has one set of rows"
    rows = open_rows(config.data.eval, split=config.data.split, part="eval")
    for index in range(len(rows)):
        with contextlib.suppress(BadRow):  # which the evaluation has words for
            if row_key(rename_fields(rows[index], config.data.columns)) in known:
                return
    raise _no_rows()


def _no_rows() -> ConfigError:
    return ConfigError("--against", why="has none of the rows of this task", fix="evaluate both on the same rows")


def read_result(path: str) -> dict[str, Any]:
    """Returns the result in a file of `mrl eval --out`. Raises ConfigError for another file."""
    try:
        with open(os.path.expanduser(path), encoding="utf-8") as file:
            result = json.load(file)
    except (OSError, ValueError) as error:
        raise ConfigError("--against", quoted(path), f"cannot be read ({error})", "give a result, or a model") from None
    if not isinstance(result, dict) or result.get("mrl_eval") != FORMAT:
        why = "is no result of `mrl eval --out`"
        raise ConfigError("--against", quoted(path), why, "give one, or a model")
    return result


# ------------------------------------------------------------------------------------------------------------ to read


def table(result: Mapping[str, Any], other: Mapping[str, Any] | None, comparison: Mapping[str, Any] | None) -> str:
    """Returns a result as a table for people, with another one if given."""
    results = [result] if other is None else [result, other]
    names = [""] if other is None else ["A: ", "B: "]
    lines = [_title(result)]
    lines += [f"{name}{of['model']['given']} ({of['model']['dtype']})" for name, of in zip(names, results, strict=True)]
    beside, rates = other is not None, all(_are_rates(of) for of in results)
    cells = [["", "A", "B", "A - B", "p"]] if beside else []
    on_pairs = results
    if comparison is not None:
        on_pairs = [{**of, "measures": own} for of, own in zip(results, comparison["of_pairs"], strict=True)]
    for k in shown(min(of["samples"] for of in results)):
        name = _name(k, greedy=all(of["samples"] == 1 for of in results), rates=rates)
        form = ".1%" if rates else ".4g"
        measured = [_of(of, k) for of in on_pairs]
        cells.append([name, *(_measure(each, form) for each in measured), *_difference(comparison, k, form)])
    for name, form in (("length", "{:.1f} tokens"), ("truncated", "{:.1%}"), ("faults", "{}")):
        cells.append([name, *(form.format(of[name]) for of in results), *(["", ""] if beside else [])])
    cells.append(["left out", *(_left_out(of) for of in results), *(["", ""] if beside else [])])
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    if comparison is not None:
        (first, *_) = comparison["measures"].values()
        counts = [len(of["rows"]) for of in results]
        if counts != [comparison["prompts"]] * 2:
            lines.append(
                f"B has {comparison['prompts']} of the {counts[0]} rows of A, and {counts[1]} in all: accuracies are "
                "of the rows that both have"
            )
        lines.append(
            f"of {comparison['prompts']} prompts that both have, A is better on {first['only_first']} and B on "
            f"{first['only_second']}; p by {first['test']}"
        )
        lines += [
            f"A and B have another {name}: {show(ours)} and {show(theirs)}"
            for name, (ours, theirs) in comparison["differ_in"].items()
        ]
    return "\n".join(lines)


def _left_out(result: Mapping[str, Any]) -> str:
    """Returns how many rows are in no figure, because they are bad or too long."""
    counts = result["left_out"]
    return f"{counts['skipped'] + counts['dropped']} rows"


def _title(result: Mapping[str, Any]) -> str:
    count, samples = len(result["rows"]), result["samples"]
    how = "greedy" if samples == 1 else f"{samples} samples at temperature {result['temperature']:g}"
    return (
        f"{result['task']}: {count} prompt{'s' * (count != 1)}, reward {result['reward']}, {how}, seed {result['seed']}"
    )


def shown(most: int) -> list[int]:
    """Returns the k of pass@k that a table has: powers of 2, and the largest."""
    return sorted({2**i for i in range(most.bit_length())} | {most})


def _of(result: Mapping[str, Any], k: int) -> Mapping[str, float | None]:
    return result["measures"]["accuracy" if result["samples"] == 1 else f"pass@{k}"]


def _are_rates(result: Mapping[str, Any]) -> bool:
    """Returns whether all values of a result are 0 or 1, and so read as percent."""
    return statistics.is_binary([value for row in result["rows"] for value in row["values"]])


def _name(k: int, *, greedy: bool, rates: bool) -> str:
    if rates:
        return "accuracy" if greedy else f"pass@{k}"
    return "mean reward" if k == 1 else f"best of {k}"


def _measure(measure: Mapping[str, float | None], form: str) -> str:
    return f"{measure['value']:{form}}{_interval(measure, form)}"


def _interval(measure: Mapping[str, float | None], form: str) -> str:
    low, high = measure["low"], measure["high"]
    return "" if low is None or high is None else f" [{low:{form}}, {high:{form}}]"


def _difference(comparison: Mapping[str, Any] | None, k: int, form: str) -> list[str]:
    if comparison is None:
        return []
    measure = comparison["measures"][f"pass@{k}"]
    return [f"{measure['difference']:+{form}}{_interval(measure, '+' + form)}", f"{measure['p']:.3g}"]
