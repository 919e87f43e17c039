"""Reinforcement learning of a real model on real prompts: SmolLM2-135M-Instruct, GSM8K, the math rewards, split over layers.

Nightly tier. The model's answers are mostly wrong at this size and length: what is shown is that everything fits together and
every guard holds.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from mrl import metrics
from tests.real.test_smollm2 import EXAMPLE, smollm2

__all__ = ["smollm2"]

pytestmark = pytest.mark.nightly
STEPS, SEQUENCES, NEW_TOKENS = 3, 8, 48


@pytest.fixture(scope="module")
def reinforced(smollm2: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:  # noqa: F811
    """The run's directory after a few iterations of the example's config on two processes, in fp32."""
    out = tmp_path_factory.mktemp("grpo")
    overrides = {
        "output_dir": out / "run", "actor.model.path": smollm2, "actor.model.dtype": "float32", "actor.engine.parallel.pp": 2,
        "actor.optimizer.lr": 1e-4, "actor.optimizer.warmup_steps": 0, "data.train": EXAMPLE / "sample.jsonl",
        "data.eval": "null", "train.eval_every": "null", "train.eval_prompts": "null", "train.epochs": "null",
        "train.steps": STEPS, "train.global_batch_size": SEQUENCES, "rollout.samples_per_prompt": 4,
        "rollout.max_new_tokens": NEW_TOKENS, "checkpoint.best": "null", "checkpoint.every": "null",
    }  # fmt: skip
    given = [f"{key}={value}" for key, value in overrides.items()]
    length = "{name: length, maximum: 60, slack: 60, label: short}"  # differs between any two answers, so that there is a gradient
    given.append(f"rewards.functions=[{{name: gsm8k}}, {{name: math, weight: 0}}, {length}]")
    command = [sys.executable, "-m", "mrl", "ppo", str(EXAMPLE / "grpo.yaml"), *given]
    done = subprocess.run(command, cwd=out, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return out / "run"


def test_guards_hold_and_the_model_moves(reinforced: pathlib.Path) -> None:
    rows = metrics.read(reinforced / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    first, last = rows[0], rows[-1]
    assert first["actor/ratio_max"] == 1.0 and first["actor/kl"] == 0.0 and first["actor/sequence_kl"] == 0.0
    assert all(row["rollout/logprob_gap"] < 1e-5 for row in rows)  # 30 layers of fp32 rounding, the mean over tokens
    assert last["actor/kl"] > 0 and all(row["train/grad_norm"] > 0 for row in rows)
    assert {"reward/gsm8k/mean", "reward/math/mean", "reward/short/mean"} <= set(first)
