"""The result of an evaluation: what is written and printed of one, and of two on the same prompts.

Dimensions: `P` prompts, `N` samples of each.
"""

from __future__ import annotations

import collections
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from mrl.errors import ConfigError, quoted
from mrl.inference import statistics
from mrl.rewards.scorer import Scores
from mrl.rollout.base import Trajectory

FORMAT = 1
"""Version of the file."""


def rows_of(
    trajectories: Sequence[Trajectory], scores: Scores, values: Sequence[float], samples: int
) -> list[dict[str, Any]]:
    """Returns what became of each prompt: lists of one entry a sample. values: what accuracy is made of."""
    found = []
    for start in range(0, len(trajectories), samples):
        part = range(start, start + samples)
        prompt = trajectories[start].prompt
        found.append(
            {
                "where": prompt.where,
                "row": hashlib.sha256(json.dumps(prompt.row, sort_keys=True, default=str).encode()).hexdigest()[:16],
                "values": [values[i] for i in part],
                "rewards": {label: [numbers[i] for i in part] for label, numbers in scores.parts.items()},
                "tokens": [trajectories[i].response_length for i in part],
                "finished": [trajectories[i].finished for i in part],
                "completions": [trajectories[i].text for i in part],
            }
        )
    return found


def measures_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Returns each measure with its interval: pass@1 to pass@N, of greedy completions the accuracy alone."""
    samples = len(rows[0]["values"])
    found = {}
    for k in range(1, samples + 1):
        values_P = [statistics.pass_at_k(row["values"], k) for row in rows]
        low, high = statistics.interval(values_P)
        found["accuracy" if samples == 1 else f"pass@{k}"] = {"value": fmean(values_P), **_bounds(low, high)}
    return found


def _bounds(low: float, high: float) -> dict[str, float | None]:
    """Returns an interval as JSON has it; one without bounds is null."""
    return {"low": low if math.isfinite(low) else None, "high": high if math.isfinite(high) else None}


def totals_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the mean length of completions in tokens, and the share of those that a limit cut."""
    tokens = [count for row in rows for count in row["tokens"]]
    finished = [ended for row in rows for ended in row["finished"]]
    return {"length": fmean(tokens), "truncated": 1 - sum(finished) / len(finished)}


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the differences of two results on the prompts that both have, each with its interval and p-value.

    The test is McNemar's exact one where both were greedy and every value is 0 or 1, else a permutation of signs of the
    prompts' differences. Raises ConfigError where no prompt or no reward is the same.
    """
    if first["reward"] != second["reward"]:
        why = f"was scored by {second['reward']}, and this is by {first['reward']}"
        raise ConfigError("--against", why=why, fix="evaluate both by the same reward")
    pairs = _paired(first["rows"], second["rows"])
    if not pairs:
        raise ConfigError("--against", why="has none of the rows of this task", fix="evaluate both on the same rows")
    samples = min(first["samples"], second["samples"])
    found: dict[str, Any] = {"prompts": len(pairs), "measures": {}}
    for k in range(1, samples + 1):
        first_P, second_P = ([statistics.pass_at_k(pair[i]["values"], k) for pair in pairs] for i in (0, 1))
        differences_P = [a - b for a, b in zip(first_P, second_P, strict=True)]
        low, high = statistics.student(differences_P)
        greedy = all(len(row["values"]) == 1 for pair in pairs for row in pair)
        exact = greedy and statistics.is_binary([*first_P, *second_P])
        if statistics.is_bounded([*first_P, *second_P]):
            low, high = max(-1.0, low), min(1.0, high)
        p = statistics.mcnemar(first_P, second_P) if exact else statistics.sign_flips(differences_P)
        found["measures"][f"pass@{k}"] = {
            "difference": fmean(differences_P), **_bounds(low, high), "p": p,
            "test": "McNemar's exact test" if exact else "paired permutation of signs",
            "only_first": sum(a > b for a, b in zip(first_P, second_P, strict=True)),
            "only_second": sum(a < b for a, b in zip(first_P, second_P, strict=True)),
        }  # fmt: skip
    return found


def _paired(
    first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Returns the rows of both, in the order of the first; of equal rows the first goes with the first."""
    waiting: dict[str, collections.deque[Mapping[str, Any]]] = collections.defaultdict(collections.deque)
    for row in second:
        waiting[row["row"]].append(row)
    return [(row, waiting[row["row"]].popleft()) for row in first if waiting[row["row"]]]


def read_result(path: str) -> dict[str, Any]:
    """Returns what `mrl eval --out` wrote. Raises ConfigError for another file."""
    try:
        with open(os.path.expanduser(path), encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            "--against", quoted(path), f"cannot be read ({reason})", "give a result, or a model"
        ) from None
    if not isinstance(found, dict) or found.get("mrl_eval") != FORMAT or not found.get("rows"):
        why = "is no result of `mrl eval --out`"
        raise ConfigError("--against", quoted(path), why, "give one, or a model")
    return found


# ------------------------------------------------------------------------------------------------------------ to read


def table(result: Mapping[str, Any], other: Mapping[str, Any] | None, comparison: Mapping[str, Any] | None) -> str:
    """Returns a result for people, beside another one where there is one."""
    results = [result] if other is None else [result, other]
    names = [""] if other is None else ["A: ", "B: "]
    lines = [_title(result)]
    lines += [f"{name}{of['model']['given']} ({of['model']['dtype']})" for name, of in zip(names, results, strict=True)]
    beside = other is not None
    cells = [["", "A", "B", "A - B", "p"]] if beside else []
    for k in shown(min(of["samples"] for of in results)):
        name = "accuracy" if all(of["samples"] == 1 for of in results) else f"pass@{k}"
        cells.append([name, *(_measure(_of(of, k)) for of in results), *_difference(comparison, k)])
    for name, form in (("length", "{:.1f} tokens"), ("truncated", "{:.1%}"), ("faults", "{}")):
        cells.append([name, *(form.format(of[name]) for of in results), *(["", ""] if beside else [])])
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    if comparison is not None:
        (first, *_) = comparison["measures"].values()
        lines.append(
            f"of {comparison['prompts']} prompts that both have, A is better on {first['only_first']} and B on "
            f"{first['only_second']}; p by {first['test']}"
        )
    return "\n".join(lines)


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


def _measure(measure: Mapping[str, float | None]) -> str:
    return f"{measure['value']:.1%}{_interval(measure, '.1%')}"


def _interval(measure: Mapping[str, float | None], form: str) -> str:
    low, high = measure["low"], measure["high"]
    return "" if low is None or high is None else f" [{low:{form}}, {high:{form}}]"


def _difference(comparison: Mapping[str, Any] | None, k: int) -> list[str]:
    if comparison is None:
        return []
    measure = comparison["measures"][f"pass@{k}"]
    return [f"{measure['difference']:+.1%}{_interval(measure, '+.1%')}", f"{measure['p']:.3g}"]
