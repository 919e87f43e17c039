"""A reward model learns what was planted in its pairs, and steers `mrl ppo` by it."""

from __future__ import annotations

import json
import pathlib
import random

import pytest

from mrl.metrics import read
from tests.engine.harness import run_case
from tests.trainers import tiny_runs
from tests.trainers.rl import tiny_policies

TOKENS = [*"0123456789+= ", "user", "assistant", "system"]
"""Of the policy's tokenizer, those that its text shows."""
PAIRS, HELD_OUT, LONGEST = 1024, 128, 12


def longer(rng: random.Random) -> tuple[list[str], list[str]]:
    """A longer answer and a shorter one, whatever they say."""
    short, long = (["1", *rng.choices(TOKENS, k=n - 1)] for n in sorted(rng.sample(range(1, LONGEST + 1), 2)))
    return long, short


def pairs(path: pathlib.Path, count: int, seed: int) -> str:
    """Writes pairs whose chosen answer is longer."""
    rng, lines = random.Random(seed), []
    for _ in range(count):
        chosen, rejected = longer(rng)
        numbers = [rng.randrange(100) for _ in range(rng.randint(1, 3))]
        prompt = "+".join(map(str, numbers)) + "="
        lines.append(json.dumps({"prompt": prompt, "chosen": "".join(chosen), "rejected": "".join(rejected)}) + "\n")
    path.write_text("".join(lines))
    return str(path)


@pytest.mark.nightly
def test_a_reward_model_of_planted_preferences_orders_held_out_pairs_and_steers_ppo(tmp_path):
    for name, make in (("rows", tiny_runs.make_inputs), ("policies", tiny_policies.make_inputs)):
        (tmp_path / name).mkdir()
        make(tmp_path / name)
    train = pairs(tmp_path / "train.jsonl", PAIRS, 0)
    held_out = pairs(tmp_path / "eval.jsonl", HELD_OUT, 1)
    config = tiny_runs.make_config(
        tmp_path / "rows", tmp_path / "rm", engine={"micro_batch": {"size": 64}}, loss={"name": "bradley_terry"},
        optimizer={"lr": 5e-3, "warmup_steps": 5, "weight_decay": 0.0}, data={"train": train, "eval": held_out},
        train={"steps": 80, "global_batch_size": 32},
    )  # fmt: skip
    assert run_case(1, "tests.trainers.rm_cases:train", config=config)[:2] == ("done", "")
    assert read(tmp_path / "rm" / "metrics.jsonl")[-1]["eval/rewards/accuracy"] >= 0.95

    ppo = tiny_policies.make_config(
        tmp_path / "policies", tmp_path / "rl", rewards=None,
        reward={"model": {"path": str(tmp_path / "rm" / "hf"), "dtype": "float32"}},
        actor={"optimizer": {"lr": 5e-3}}, rollout={"samples_per_prompt": 8, "max_new_tokens": LONGEST},
        algorithm={"kl_in": "none", "mini_batch_size": 32}, train={"steps": 24, "global_batch_size": 64},
    )  # fmt: skip
    assert run_case(1, "tests.trainers.rl.cases:train", config=ppo)[:2] == ("done", "")
    rows = [row for row in read(tmp_path / "rl" / "metrics.jsonl") if "reward/mean" in row]
    assert rows[-1]["reward/mean"] > rows[0]["reward/mean"] + 2
    assert rows[-1]["rollout/response_length"] > rows[0]["rollout/response_length"] + 1
