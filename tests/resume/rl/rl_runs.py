"""Runs of `mrl ppo` on a tiny model, in a few layouts and algorithms, and what happens to them."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from tests.config.test_load import merged
from tests.engine import tiny
from tests.engine.harness import run_case
from tests.trainers.tiny_runs import load_example

STEPS = 8
ROWS, EVAL_ROWS = 10, 10
REWARDS = '''
import pathlib

FAULTS = pathlib.Path(__file__).with_name("faults.txt")


def digits(prompt, completion, row):
    """More for more digits, and for the right first one; raises for rows that a file beside this one names."""
    if FAULTS.exists() and row["id"] in FAULTS.read_text().split():
        raise ValueError("the judge is ill")
    return sum(c.isdigit() for c in completion) / 8 + completion.startswith(row["answer"][0])
'''

FSDP = {"backend": "fsdp"}
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "ppo": (
        2,
        {
            "actor": {"engine": {"parallel": {"tp": 2}}},
            "critic": {"engine": {**FSDP, "device": "cpu"}, "optimizer": {"lr": 5e-3, "schedule": "linear"}},
            "algorithm": {
                "name": "ppo", "epochs": 2, "mini_batch_size": 4, "kl_in": "reward", "kl_coef": 0.1, "kl_target": 0.5,
                "kl_gain": 0.5,
            },
        },
    ),
    "grpo": (
        1,
        {
            "actor": {"model": {"path": "dropout"}},
            "algorithm": {"name": "grpo", "epochs": 2, "mini_batch_size": 4, "kl_in": "loss", "kl_coef": 0.1},
            "reference": {"update_every": 4},
            "train": {"guards": False},
        },
    ),
    "dapo": (
        2,
        {
            "actor": {"engine": FSDP},
            "algorithm": {"name": "dapo", "mini_batch_size": 2, "overlong_fraction": 0.5},
            "rewards": {"functions": [{"name": "length", "minimum": 8}]},
        },
    ),
    "opd": (
        2,
        {
            "actor": {"engine": FSDP},
            "reference": {"model": {"path": "teacher"}},
            "algorithm": {"name": "opd", "distill": {"top_k": 5}, "epochs": 2, "mini_batch_size": 4},
        },
    ),
}  # fmt: skip
"""Name -> processes, and what its config changes: a critic with another backend and a KL that is steered; dropout, which draws
from the RNG in every step, and a reference that moves; more prompts for an iteration than its size says; a teacher."""


def make_inputs(folder: pathlib.Path) -> pathlib.Path:
    """Models plain, dropout and teacher, rows for training and evaluation, and a file with a reward function."""
    tokenizer = load_example("arithmetic/make_data.py").make_tokenizer()
    for name, dropout, seed in (("plain", 0.0, 0), ("dropout", 0.1, 0), ("teacher", 0.0, 1)):
        tiny.make_model(str(folder / name), "qwen3", vocab=len(tokenizer), attention_dropout=dropout, seed=seed)
        tokenizer.save_pretrained(folder / name)
    for part, first, count in (("train", 10, ROWS), ("eval", 50, EVAL_ROWS)):
        rows = [
            {"prompt": f"{i}+{7 * i % 40}" + "+1" * (i % 3) + "=", "answer": str(i), "id": f"{part}{i}"}
            for i in range(first, first + count)
        ]
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def make_config(inputs: pathlib.Path, output_dir: pathlib.Path, name: str, **changes: Any) -> dict[str, Any]:
    """Plain data of the config of a run of RUNS. changes: over it, merged key by key."""
    config = {
        "output_dir": str(output_dir),
        "seed": 3,
        "actor": {
            "model": {"path": "plain", "dtype": "float32"},
            "engine": {"device": "cpu", "micro_batch": {"size": 2}},
            "optimizer": {"lr": 2e-3, "schedule": "cosine", "warmup_steps": 2, "eps": 1e-6},
        },
        "rollout": {"samples_per_prompt": 2, "max_new_tokens": 6},
        "rewards": {"functions": [{"function": f"{inputs}/rewards.py:digits"}], "workers": 1},
        "data": {
            "train": str(inputs / "train.jsonl"),
            "eval": str(inputs / "eval.jsonl"),
            "max_prompt_length": 24,
        },
        "train": {"steps": STEPS, "global_batch_size": 8, "eval_every": 3},
        "checkpoint": {"every": 3},
        "log": {"console": "plain"},
    }
    config = merged(merged(config, RUNS[name][1]), changes)
    for role in ("actor", "reference"):
        if model := config.get(role, {}).get("model"):
            model["path"] = str(inputs / model["path"])
    return config


def train(config: dict[str, Any], world: int, **happening: Any) -> tuple[str, str, str]:
    """The trainer in the processes of tests/engine/harness.py: how it ended, its message, and what it printed."""
    return run_case(world, "tests.resume.rl.cases:train", config=config, **happening)


def finish(config: dict[str, Any], world: int) -> str:
    """Trains to the end. Returns what was printed."""
    ended, message, said = train(config, world)
    assert ended == "done", f"{ended}: {message}"
    return said
