"""A command that another package adds: its record, its trainer, its loss, and nothing else. `mrl unlearn` is listed, explained,
dry-run, trained, resumed, submitted and converted by the code that knows no command by name.

The package is tests/commands/external/mrl_unlearn; a module of mrl/commands is found as its entry point is (`mrl.config.command`).
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from tests.forks import forks
from tests.trainers import tiny_runs

PACKAGE = pathlib.Path(__file__).parent / "external" / "mrl_unlearn"
FILES = ["__init__.py", "check.py", "loss.py", "record.py", "trainer.py"]
METADATA = {
    "METADATA": "Metadata-Version: 2.1\nName: mrl-unlearn\nVersion: 1.0\n",
    "entry_points.txt": "[mrl.commands]\nunlearn = mrl_unlearn.record:COMMAND\n",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> pathlib.Path:
    """A folder with the package as pip installs it."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(PACKAGE, folder / "mrl_unlearn", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "mrl_unlearn-1.0.dist-info").mkdir()
    for name, text in METADATA.items():
        (folder / "mrl_unlearn-1.0.dist-info" / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("inputs")
    tiny_runs.make_inputs(folder)
    return folder


@pytest.fixture
def mrl(site, inputs, tmp_path):
    """`mrl WORD...` beside a config.yaml, as a process of its own; warm: in a fork of one that has imported what trains."""
    config = tiny_runs.make_config(inputs, tmp_path / "run", train={"steps": 1}, forget={"floor": -6})
    config["optimizer"] = {"lr": 1e-2, "schedule": "constant"}
    tiny_runs.write_config(tmp_path / "config.yaml", config)

    def run(*words: object, warm: bool = False, **environ: str) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_") and k not in ("RANK", "WORLD_SIZE")}
        env |= {
            "PYTHONPATH": f"{tiny_runs.REPO}{os.pathsep}{site}",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            **environ,
        }
        if warm:
            said = [tmp_path / name for name in ("out", "err")]
            for path in said:
                path.write_text("")
            code = forks().start(tmp_path, said[0], env, [str(word) for word in words], said[1]).wait(300)
            return subprocess.CompletedProcess(words, code, *(path.read_text() for path in said))
        command = [sys.executable, "-m", "mrl", *map(str, words)]
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    return run


def test_it_touches_its_own_files_alone():
    assert sorted(path.name for path in PACKAGE.glob("*.py")) == FILES
    naming = [path for path in (tiny_runs.REPO / "mrl").rglob("*.py") if "unlearn" in path.read_text(encoding="utf-8")]
    assert not naming, "no part of mrl knows it by name"


def test_no_part_of_mrl_asks_which_command_trains():
    """Names of commands as texts, and types of their configs, stand in records, in what only one command has, and in the rooms of
    trainers: everything else asks the record."""
    rooms = r"commands|check/steps|algorithms|trainers/(sft|ppo|rl)|rollout|roles|config/(schema|ppo|recipes|roles|checks|teacher_checks|load|translate)"
    found = [
        f"{path.relative_to(tiny_runs.REPO)}: {line.strip()}"
        for path in sorted((tiny_runs.REPO / "mrl").rglob("*.py"))
        if not re.match(rooms, path.relative_to(tiny_runs.REPO / "mrl").as_posix())
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"""["'](sft|ppo)["']|isinstance\(\w+, (SFT|PPO)Config\)|PPOConfig\b""", line)
    ]
    assert found == ['mrl/config/docs.py: looked = list(roots) if names or wanted else ["sft"]'], (
        "mrl config without words"
    )


def test_the_command_line_lists_and_explains_it(mrl, tmp_path):
    listed = mrl("--help").stdout
    assert (
        re.search("  unlearn +Make a model forget the rows that the YAML file CONFIG names\n", listed)
        and "  sft " in listed
    )
    shown = mrl("unlearn", "--help").stdout
    assert "unlearn [OPTIONS] CONFIG [KEY=VALUE]..." in shown and "--dry-run" in shown
    assert shown.endswith("  Examples:\n    mrl unlearn unlearn.yaml forget.floor=-5\n")
    keys = mrl("config", "unlearn", "forget").stdout
    assert "forget.floor  (default -8.0; a number of at most 0)" in keys and "optimizer" not in keys
    assert mrl("config", "forget").stdout == keys
    asked = {"_MRL_COMPLETE": "bash_complete", "COMP_WORDS": "mrl unlearn config.yaml forget.s", "COMP_CWORD": "3"}
    assert mrl(**asked).stdout == "plain,forget.say_every=\n"


def test_a_dry_run_checks_it_and_says_what_it_would_do(mrl, tmp_path):
    done = mrl("unlearn", "config.yaml", "engine.backend=megatron", "--nproc", "2", "--dry-run", warm=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert yaml.safe_load(done.stdout)["forget"] == {"floor": -6.0, "say_every": 1}
    assert done.stdout.splitlines()[-2:] == ["# layout: dp2", "# forgets in 1 steps, down to -6"]
    assert not (tmp_path / "run").exists()
    for words, says in (
        (["forget.say_every=3"], "forget.say_every: value 3 is above train.steps 1; give at most 1"),
        (["forget.flor=-3"], "forget.flor: value -3 is given to an unknown key; did you mean forget.floor?"),
        (["data.train=gone.jsonl"], "data.train: value 'gone.jsonl' does not exist; give .jsonl[.gz|.zst], .parquet, "),
        (["--nproc", "8"], "train.global_batch_size: value 4 is less than the 8 data-parallel replicas (dp8 on 8 "),
    ):
        refused = mrl("unlearn", "config.yaml", *words, "--dry-run", warm=True)
        assert (refused.returncode, refused.stdout) == (2, "") and f"mrl: {says}" in refused.stderr, refused.stderr
    other = mrl("sft", "config.yaml", "--dry-run", warm=True)
    assert other.returncode == 2 and "has the sections of a config of mrl unlearn" in other.stderr, other.stderr


@pytest.mark.slow
def test_it_trains_and_goes_on_as_its_keys_say(mrl, tmp_path):
    first = mrl("unlearn", "config.yaml", warm=True)
    assert first.returncode == 0, first.stderr
    assert "step 1: " in first.stdout and "`mrl unlearn` takes this file" in (tmp_path / "run/config.yaml").read_text()
    refused = mrl("unlearn", "config.yaml", "train.steps=2", "forget.floor=-5", warm=True)
    assert refused.returncode == 2 and refused.stderr == (
        "mrl: forget.floor: value -5.0 is not the -6.0 that the checkpoint was saved with; set the saved values again, or start "
        f"anew with another output_dir than {tmp_path / 'run'}\n"
    )
    (tmp_path / "sft.yaml").write_text((tmp_path / "config.yaml").read_text().replace("forget:\n  floor: -6\n", ""))
    other = mrl("sft", "sft.yaml", "train.steps=2", warm=True)
    assert other.returncode == 2 and "is given to `mrl sft`, and what was saved is of `mrl unlearn`" in other.stderr
    second = mrl("unlearn", "config.yaml", "train.steps=3", "forget.say_every=2", warm=True)
    assert second.returncode == 0, second.stderr
    assert "changed since the checkpoint: forget.say_every: 1 at the save, 2 now" in second.stdout
    assert "step 2: " in second.stdout and "step 1: " not in second.stdout and "step 3: " not in second.stdout
    assert (tmp_path / "run/checkpoints/latest").read_text().strip() == "step_00000003"


@pytest.mark.nightly
def test_its_step_is_checked(mrl):
    """Against its own loss in plain torch; `mrl check` knows it by its record alone."""
    done = mrl(
        "check", "config.yaml", "engine.backend=megatron", "forget.floor=-4.5", "--layouts", "dp1", "--json", warm=True
    )
    found = json.loads(done.stdout)
    assert done.returncode == 0 and [row["verdict"] for row in found["rows"]] == ["same"], (found, done.stderr)
    loss = found["rows"][0]["numbers"]["loss"]
    assert 0 < loss < 4.5, loss  # and not the negative log-prob of mrl sft
