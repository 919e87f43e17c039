"""Every example of the help of `mrl`, `mrl sft`, `mrl ppo`, `mrl convert` and `mrl config`, run as it stands.

Those of each other command run beside its tests; tests/test_cli.py parses all of them.
"""

from __future__ import annotations

import json
import pathlib
import re
import shlex
from collections.abc import Callable
from typing import Any

import pytest

from mrl import cli
from mrl.config.command import record
from tests.inference.cases import in_a_shell, mrl
from tests.trainers import tiny_runs
from tests.trainers.rl import tiny_policies

SFT, CRITIC = "mrl sft sft.yaml", "mrl ppo grpo.yaml algorithm.name=ppo critic.engine.backend=fsdp"
IMPORT = "mrl convert import path/to/hf-model model-mcore --verify"
STEPS = 2
NAMED = "step_00000100"
"""The checkpoint that an example names; the run here has fewer steps."""

VERL = {
    "algorithm": {"adv_estimator": "grpo"}, "actor_rollout_ref": {"model": {"path": "model"}},
    "data": {"train_files": "rows.jsonl"}, "trainer": {"default_local_dir": "runs/verl"},
}  # fmt: skip

WRITTEN_BY = {
    "runs/demo ": (SFT, "runs/demo"),
    "runs/demo/": (SFT, "runs/demo"),
    "runs/demo-rl": (CRITIC, "runs/demo-rl"),
    "verify path/to/hf-model model-mcore": (IMPORT, "model-mcore"),
}
"""What a line reads: (the example that writes it, where)."""


def lines_of(examples: str) -> list[str]:
    return [re.split(r"  +", line.strip())[0] for line in examples.strip().splitlines()]


def parameters() -> list[Any]:
    """The lines of all help, each once. Those of several processes are of the nightly tier."""
    groups = [record(name) for name in ("sft", "ppo", "convert", "config")]
    texts = [cli.EXAMPLES, *(of.examples for of in groups), *(of.examples for of in groups[2].commands.values())]
    lines = dict.fromkeys(line for text in texts for line in lines_of(text))
    several = ("--nproc", "torchrun")
    return [
        pytest.param(line, marks=pytest.mark.nightly if any(word in line for word in several) else pytest.mark.slow)
        for line in lines
    ]


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Callable[[str], tuple[str, pathlib.Path]]:
    """Runs a line in a folder of its own, once, with the files that it reads. Returns what it printed, and the folder."""
    inputs, done = tmp_path_factory.mktemp("inputs"), {}
    for name, make in (("sft", tiny_runs.make_inputs), ("ppo", tiny_policies.make_inputs)):
        (inputs / name).mkdir()
        make(inputs / name)
    sft = tiny_runs.make_config(
        inputs / "sft", pathlib.Path("runs/demo"), engine=tiny_policies.engine("megatron", size=2),
        train={"steps": STEPS, "global_batch_size": 8}, checkpoint={"every": STEPS},
    )  # fmt: skip
    grpo = tiny_policies.make_config(
        inputs / "ppo", pathlib.Path("runs/demo-rl"), rollout={"samples_per_prompt": 4},
        algorithm={"mini_batch_size": 8}, train={"steps": STEPS, "global_batch_size": 16}, checkpoint={"every": STEPS},
    )  # fmt: skip

    def of(line: str) -> tuple[str, pathlib.Path]:
        if line not in done:
            done[line] = one(line, tmp_path_factory.mktemp("example"))
        return done[line]

    def one(line: str, folder: pathlib.Path) -> tuple[str, pathlib.Path]:
        tiny_runs.write_config(folder / "sft.yaml", sft)
        tiny_runs.write_config(folder / "grpo.yaml", grpo)
        tiny_runs.write_config(folder / "verl.yaml", VERL)
        links = {"path/to/hf-model": "sft/model", "Qwen/Qwen3-0.6B": "sft/model"}
        if " verify " in line:
            links["exported"] = "sft/model"  # what a run has trained differs
        reads = {name: inputs / source for name, source in links.items()}
        reads |= {place: of(writer)[1] / place for words, (writer, place) in WRITTEN_BY.items() if words in line}
        for name, source in reads.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(source)
        line = line.replace(NAMED, f"step_{STEPS:08d}")
        if "--nproc" in line or line.startswith("torchrun"):
            shown = in_a_shell(line, folder)
            assert shown.returncode == 0, shown.stdout[-2000:] + shown.stderr[-2000:]
            return shown.stdout, folder
        ended = mrl(*shlex.split(line)[1:], cwd=folder)
        assert ended.code == 0, ended.out[-2000:] + ended.err
        return ended.out, folder

    return of


@pytest.mark.parametrize("line", parameters())
def test_an_example_of_the_help(ran, line):
    shown, folder = ran(line)
    words = shlex.split(line.partition("-m ")[2] or line)[1:]
    if words[0] == "config":
        wanted = words[-1] if len(words) > 1 else "sft"
        keys = {"sft": "optimizer.lr", "ppo": "algorithm.name", "rollout": "rollout.top_p", "clip": "clip"}
        assert {**keys, "verl.yaml": "output_dir: runs/verl"}[wanted] in shown
    elif "--dry-run" in words:
        assert f"# length: {STEPS} steps" in shown and not (folder / "runs").exists()
    elif words[0] in ("sft", "ppo"):
        run_dir = folder / ("runs/demo" if words[0] == "sft" else "runs/demo-rl")
        steps = 10 if "train.steps=10" in words else STEPS
        assert [row["step"] for row in tiny_runs.steps(run_dir)] == list(range(1, steps + 1))
        assert (run_dir / "hf" / "model.safetensors").is_file() and f"done: {steps} steps" in shown
    elif words[1] == "verify":
        assert json.loads(shown)["same"] if "--json" in words else "same" in shown
    else:
        assert ("--verify" in words) == ("logits" in shown)
        assert (folder / words[3] / "config.json").is_file()
