"""Adding a family, an algorithm, a reward, a key: each is added here, used, and the files that it touched are counted.

Families, algorithms and keys are added to a copy of the tree; a reward is a file of the user's. Engines are added by
tests/engine/test_registry.py, commands by tests/commands/test_adding.py.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mrl import cli
from tests.trainers import tiny_runs

FAMILY = '''\
"""Seed-OSS: Llama's names with biases on q, k and v."""

from typing import Any

from mrl.weights.fields import DENSE, dense_fields, require
from mrl.weights.table import ATTENTION, DENSE_MLP, Family, qkv_bias


def fields(hf: dict[str, Any]) -> dict[str, Any]:
    require(hf, "attention_bias", (True,))
    require(hf, "attention_out_bias", (False,))
    require(hf, "residual_dropout", (0, None))
    return dense_fields(hf, qkv_bias=True)


FAMILY = Family(
    model_type="seed_oss",
    layer=ATTENTION + qkv_bias(),
    dense=DENSE_MLP,
    reads=DENSE | {"attention_out_bias", "residual_dropout"},
    fields=fields,
)
'''
TINY = '    "seed_oss": ("seed_oss", {"head_dim": 16, "attention_dropout": 0.0, "residual_dropout": 0.0}),\n'
RECIPE = '    "mine": {"advantage": "rloo", "objective": "cispo", "clip_low": 1.0, "clip_high": 3.0},\n'
KEY = '    greeting: str = key("hello", "said when a run starts", may_change=True)\n'
READS = "        console.say(config.log.greeting)\n"
REWARD = """\
def brevity(prompt, completion, row):
    return 1.0 / (1 + len(completion) + row["weight"])
"""
CONFIG = {
    "actor": {
        "model": {"path": "model", "dtype": "float32"},
        "engine": {"backend": "fsdp", "device": "cpu"},
        "optimizer": {"schedule": "constant"},
    },
    "algorithm": {"name": "grpo"},
    "rollout": {"samples_per_prompt": 2, "max_new_tokens": 4},
    "rewards": {"functions": [{"function": "my_rewards.py:brevity"}], "workers": 1},
    "data": {"train": "prompts.jsonl", "max_prompt_length": 16},
    "train": {"steps": 1, "global_batch_size": 4},
    "log": {"console": "plain"},
    "output_dir": "run",
}


@pytest.fixture
def tree(tmp_path) -> Path:
    """A copy of what is imported, with its bytecode."""
    for name in ("mrl", "tests", "examples"):
        shutil.copytree(tiny_runs.REPO / name, tmp_path / "tree" / name)
    return tmp_path / "tree"


@pytest.fixture
def inputs(tmp_path) -> Path:
    """A folder with a model, prompts, a reward function in a file of its own, and the config of a run on them."""
    folder = tmp_path / "inputs"
    folder.mkdir()
    tiny_runs.make_inputs(folder)
    (folder / "prompts.jsonl").write_text('{"prompt": "1+1=", "weight": 1}\n' * 4)
    (folder / "my_rewards.py").write_text(REWARD)
    tiny_runs.write_config(folder / "grpo.yaml", CONFIG)
    return folder


def touched(tree: Path) -> list[str]:
    """The files of the copy that are new or other than the tree's."""
    files = [p.relative_to(tree) for p in tree.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    same, other, new = filecmp.cmpfiles(tree, tiny_runs.REPO, files, shallow=False)
    assert len(same) > 200
    return sorted(str(name) for name in (*other, *new))


def insert(file: Path, line: str, after: str) -> None:
    """Puts `line` below the one that begins with `after`."""
    text = file.read_text(encoding="utf-8")
    assert text.count(f"\n{after}") == 1
    end = text.index("\n", text.index(f"\n{after}") + 1) + 1
    file.write_text(text[:end] + line + text[end:], encoding="utf-8")


def run(*arguments: str, folder: Path, tree: Path = tiny_runs.REPO) -> str:
    """What Python prints, with `tree` on its import path; fails with it where it fails."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly
def test_a_family_is_two_files(tree):
    """The new family's loss, gradients and steps are transformers': it stands in the parity table by itself."""
    (tree / "mrl/weights/families/seed_oss.py").write_text(FAMILY)
    insert(tree / "tests/engine/tiny.py", TINY, "FAMILIES")
    printed = run("-m", "tests.engine.parity", "--only", "seed_oss", folder=tree, tree=tree)
    rows = [line for line in printed.splitlines() if line.startswith("seed_oss")]
    assert [line.split()[-1] for line in rows] == ["ok"] and "every row is right" in printed
    assert touched(tree) == ["mrl/weights/families/seed_oss.py", "tests/engine/tiny.py"]


@pytest.mark.nightly
def test_an_algorithm_is_one_file_and_trains(tree, inputs):
    insert(tree / "mrl/config/recipes.py", RECIPE, "ROWS")
    run("-m", "mrl", "ppo", "grpo.yaml", "algorithm.name=mine", folder=inputs, tree=tree)
    [row] = tiny_runs.steps(inputs / "run")
    assert row["reward/brevity/mean"] > 0 and "actor/loss" in row
    assert touched(tree) == ["mrl/config/recipes.py"]


def test_a_reward_is_one_file_of_the_users(inputs, monkeypatch):
    """`my_rewards.py` alone: the config names it, and the checks before a run load it."""
    monkeypatch.chdir(inputs)
    done = CliRunner().invoke(cli.main, ["ppo", "grpo.yaml", "--dry-run"])
    assert done.exit_code == 0 and "my_rewards.py:brevity" in done.output
    (inputs / "my_rewards.py").unlink()
    assert CliRunner().invoke(cli.main, ["ppo", "grpo.yaml", "--dry-run"]).exit_code == 2


@pytest.mark.nightly
def test_a_key_is_a_line_and_the_code_that_reads_it(tree, inputs):
    """Its default, type, meaning, and what a resume may do with it, follow from the line."""
    insert(tree / "mrl/config/schema.py", KEY, "class LogConfig")
    insert(tree / "mrl/trainers/rows.py", READS, "        config = self.config\n        console.doing")
    assert "said when a run starts" in run("-m", "mrl", "config", "sft", "log.greeting", folder=inputs, tree=tree)
    optimizer = {"schedule": "constant", "warmup_steps": 0}
    config = tiny_runs.make_config(inputs, inputs / "sft", train={"steps": 1}, optimizer=optimizer)
    tiny_runs.write_config(inputs / "sft.yaml", config)
    words = ("-m", "mrl", "sft", "sft.yaml", "log.console=plain")
    assert "hello" in run(*words, folder=inputs, tree=tree).splitlines()
    said = run(*words, "log.greeting=welcome", "train.steps=2", folder=inputs, tree=tree)
    assert "welcome" in said.splitlines() and 'log.greeting: "hello" at the save, "welcome" now' in said
    assert touched(tree) == ["mrl/config/schema.py", "mrl/trainers/rows.py"]
