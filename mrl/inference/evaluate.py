"""`mrl eval` on every rank: accuracy or pass@k of a model on a task, and of a second one beside it.

Prompts, rollouts, scoring and the metrics are those of the evaluation in `mrl ppo` (mrl/trainers/rl/evaluation.py), so
that the numbers are the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
from typing import Any

from mrl.config.inference import EvalConfig, PlaceConfig
from mrl.config.load import to_dict
from mrl.inference.loaded import load_model, prompts_of_file
from mrl.inference.output import open_console, write_whole
from mrl.inference.results import (
    FORMAT,
    compare,
    measures_of,
    read_result,
    reward_file,
    reward_in_words,
    rows_of,
    table,
    totals_of,
)
from mrl.rewards.scorer import Scores
from mrl.rollout.base import Trajectory
from mrl.trainers.common import say_all, say_left_out
from mrl.trainers.console import Console
from mrl.trainers.rl.evaluation import Evaluation
from mrl.trainers.rl.scoring import Scoring
from mrl.trainers.run_directory import git_states, versions

ROWS_AT_ONCE = 256
"""Completions that are sampled together."""


def run(config: EvalConfig, command_line: str = "") -> None:
    """Evaluates, compares, prints and writes. Collective. Raises UserError for what the user can put right."""
    request = config.request
    with contextlib.closing(open_console()) as console:
        saved = None if request.against is None else read_result(request.against)
        result = evaluate(config, config.place, console, command_line)
        if config.other is not None:
            gc.collect()  # the first model is gone before there is memory for the second
            saved = evaluate(of_other(config, config.other), config.other, console, command_line)
        if not console.shows:
            return
        comparison = None if saved is None else compare(result, saved)
        if saved is not None:
            result |= {"against": {name: saved[name] for name in ("model", "measures")}, "comparison": comparison}
        console.close()
        text = json.dumps(result, ensure_ascii=False) if request.as_json else table(result, saved, comparison)
        print(text, flush=True)  # first: a full disk loses the file alone
        if request.out is not None:
            write_whole(result, request.out)


def of_other(config: EvalConfig, place: PlaceConfig) -> EvalConfig:
    """Returns the config of the second model: the same but for where it is, and the dtype of its weights."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, path=place.folder, dtype=place.dtype))


def evaluate(config: EvalConfig, place: PlaceConfig, console: Console, command_line: str) -> dict[str, Any]:
    """Returns the result of one model on the task. The same on every rank. Collective."""
    samples = config.rollout.samples_per_prompt
    found: list[tuple[list[Trajectory], Scores]] = []
    with load_model(config, place, console) as model, contextlib.ExitStack() as ends:
        prompts, report, rows = prompts_of_file(config, model, limit=config.request.limit)
        say_all(console, rows.template_notes())
        say_left_out(console, "eval", report.counts, report.notes)
        console.doing("starting the reward functions")
        scores = Scoring(
            config.rewards, reports=None, on_main=model.dispatch.on_main, first=rows.first_rows(), say=console.say
        )
        ends.callback(scores.close)
        evaluation = Evaluation(
            {"": prompts}, model.rollouts, scores, samples=samples, prompts_at_once=max(1, ROWS_AT_ONCE // samples),
            doing=console.doing, stop_requested=lambda: False, seen=lambda step, *seen: found.append(seen),
        )  # fmt: skip
        metrics = evaluation.run(0)
        fingerprint = rows.fingerprint()
    [(trajectories, whole)] = found
    outcomes = rows_of(trajectories, whole, scores.accuracy_of(whole), samples)
    plain = to_dict(config)
    return {
        "mrl_eval": FORMAT, "task": config.request.task, "reward": reward_in_words(config), "samples": samples,
        "temperature": 0.0 if samples == 1 else config.rollout.temperature, "seed": config.seed,
        "model": {"given": place.given, "what": model.what, "dtype": config.model.dtype},
        "reward_file": reward_file(config.rewards), "left_out": report.counts,
        "measures": measures_of(outcomes), **totals_of(outcomes), "faults": len(whole.faults),
        "metrics": metrics, "data": fingerprint, "versions": versions(), **git_states(), "command": command_line,
        "config": {name: plain[name] for name in ("seed", "model", "engine", "rollout", "data", "rewards")},
        "world_size": model.dispatch.world_size, "rows": outcomes,
    }  # fmt: skip
