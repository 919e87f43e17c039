"""vLLM inside the trainer, in one process and in two, with both backends (slow tier): real training runs on the CPU.

On a CPU vLLM takes the calls to sleep and to wake, follows which parts of it are asleep, and frees nothing: their order is
shown here, and their memory nowhere. What needs no vLLM is in test_vllm_parts.py.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess

import pytest

from mrl import metrics
from tests.engine.harness import _free_port as free_port
from tests.engine.harness import close_worlds
from tests.rollout.real_vllm import ENVIRONMENT, ROOT, VENV, make_model
from tests.trainers.tiny_runs import steps

pytestmark = pytest.mark.slow

PROMPTS = [{"prompt": " ".join(f"w{5 + 7 * i + j}" for j in range(1 + i))} for i in range(4)]
SAMPLES = 3
LETTERS = {
    "sleep": "s", "a role builds": "B", "roles to host": "h", "wake_up weights": "w", "collective_rpc": "r", "wake_up kv_cache": "k",
    "generate": "g",
}  # fmt: skip
ORDER = r"s(Bh)+(h+wrh+kg+sh*){5}"
"""Asleep before the first role builds; then, five times, with all roles on the host: the engine's weights wake, the new ones come, the roles
are on the host again, the KV cache wakes, and after sampling all sleeps. Three of the five are evaluations."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("inputs")
    make_model(str(folder / "model"), 0)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return folder


def config_of(inputs: pathlib.Path, output: pathlib.Path, backend: str, trainer_tp: int = 1, **server) -> dict:
    """Two iterations of one step each, and an evaluation before and after each step."""
    return {
        "output_dir": str(output),
        "actor": {
            "model": {"path": str(inputs / "model"), "dtype": "float32"},
            "engine": {"backend": backend, "device": "cpu", "parallel": {"tp": trainer_tp}, "micro_batch": {"size": 3}},
            "optimizer": {"lr": 1e-3, "schedule": "constant", "warmup_steps": 0},
        },
        "rollout": {
            "backend": "vllm", "server": server, "samples_per_prompt": SAMPLES, "max_new_tokens": 8, "temperature": 0.7,
        },
        "algorithm": {"name": "grpo"},
        "rewards": {"functions": [{"name": "length", "maximum": 4, "slack": 20}], "workers": 1},
        "data": {"train": str(inputs / "rows.jsonl"), "eval": str(inputs / "rows.jsonl"), "max_prompt_length": 16},
        "train": {"steps": 2, "global_batch_size": SAMPLES * len(PROMPTS), "eval_every": 1, "offload_idle": "always"},
        "log": {"console": "none"},
    }  # fmt: skip


def run(folder: pathlib.Path, world: int, *runs: dict) -> list[list[dict]]:
    """What each rank wrote down of each run."""
    task = {"out": str(folder), "runs": runs}
    (folder / "task.json").write_text(json.dumps(task))
    close_worlds()
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    meet = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [str(VENV / "bin" / "python"), "-m", "tests.rollout.local_vllm", str(folder / "task.json")]
    ranks = [
        subprocess.Popen(
            command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=environment | (meet | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {}),
        )
        for rank in range(world)
    ]  # fmt: skip
    said = [process.communicate()[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0] * world, "\n\n".join(text[-4000:] for text in said)
    (folder / "said.txt").write_text("".join(said))
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(world)]


def samples(output: pathlib.Path) -> list[list[int]]:
    """The tokens of all rollouts."""
    files = sorted((output / "samples").glob("step_*.jsonl"))
    assert len(files) == 2, sorted((output / "samples").iterdir())
    return [json.loads(line)["tokens"] for file in files for line in file.read_text().splitlines()]


def check_run(rank: dict, output: pathlib.Path) -> None:
    """The engine slept before a role was built, and each hand-over is in its order; log-probs are the actor's."""
    assert rank["ended"] == "done"
    assert re.fullmatch(ORDER, "".join(LETTERS[event] for event in rank["events"])), rank["events"]
    rows = metrics.read(output / "metrics.jsonl")
    gaps = [row["rollout/logprob_gap_max"] for row in rows if "rollout/logprob_gap_max" in row]
    assert len(gaps) == 2 and max(gaps) < 1e-5, gaps


@pytest.fixture(scope="module")
def alone(inputs, tmp_path_factory) -> tuple[list[list[dict]], pathlib.Path]:
    """One process: what it wrote down, and the folder of the run."""
    folder = tmp_path_factory.mktemp("alone")
    once, more = config_of(inputs, folder / "resumed", "fsdp"), config_of(inputs, folder / "resumed", "fsdp")
    once["train"] = once["train"] | {"steps": 1}
    first = config_of(inputs, folder / "fsdp", "fsdp") | {"log": {"console": "plain"}}
    runs = [{"config": config} for config in (first, once, more)]
    return run(folder, 1, *runs), folder


@pytest.fixture(scope="module")
def two(inputs, tmp_path_factory) -> tuple[list[list[dict]], pathlib.Path]:
    """Two processes, which make two runs: an engine each, and one engine together."""
    folder = tmp_path_factory.mktemp("two")
    return run(
        folder, 2,
        {"config": config_of(inputs, folder / "fsdp", "fsdp")},
        {"config": config_of(inputs, folder / "megatron", "megatron", 2, tp=2)},
    ), folder  # fmt: skip


def test_one_process(alone):
    ((found, *_),), folder = alone
    check_run(found, folder / "fsdp")
    lines = [line for line in (folder / "said.txt").read_text().splitlines() if line.startswith("rollout")]
    assert lines == ["rollout: vLLM inside the trainer, 1 engine of tp 1"], "and nothing of a version that is tested"


def test_a_resumed_run_goes_on_to_the_bit(alone):
    """With another engine, in the same process: what vLLM drew and changed is none of the trainer's."""
    ((_, *two_parts),), folder = alone
    assert [part["ended"] for part in two_parts] == ["done", "done"]
    assert samples(folder / "resumed") == samples(folder / "fsdp")
    last = [steps(folder / name)[-1] for name in ("resumed", "fsdp")]
    assert all(row.pop("rollout/tokens_per_s") > 0 for row in last) and last[0] == last[1]
    resumed, whole = (folder / name / "hf" / "model.safetensors" for name in ("resumed", "fsdp"))
    assert resumed.read_bytes() == whole.read_bytes()


def test_an_engine_in_each_of_two_processes(alone, two):
    """They share the requests, and give together what one engine gives."""
    ranks, folder = two
    for rank in ranks:
        check_run(rank[0], folder / "fsdp")
    assert samples(folder / "fsdp") == samples(alone[1] / "fsdp")
    first, second = (rank[0]["prompts"] for rank in ranks)
    assert len(first) == len(second) and len(first) + len(second) == len(alone[0][0][0]["prompts"])


def test_one_engine_of_two_processes(alone, two):
    """Both run all requests."""
    ranks, folder = two
    for rank in ranks:
        check_run(rank[1], folder / "megatron")
        assert rank[1]["prompts"] == alone[0][0][0]["prompts"]
    assert samples(folder / "megatron") == samples(alone[1] / "fsdp")


@pytest.mark.nightly
def test_a_load_that_fails_ends_every_rank_in_one_line(inputs, tmp_path):
    for rank in run(tmp_path, 2, {"config": config_of(inputs, tmp_path / "broken", "fsdp"), "broken_on": 1}):
        line = rank[0]["ended"]
        assert "rollout.backend: vLLM inside the trainer has not taken the actor's weights on rank 1" in line
        assert "(RuntimeError: a load that fails); nothing is sampled from them" in line and "\n" not in line
        assert line.endswith(f"steps 1 to 1 are saved in {tmp_path}/broken/checkpoints/step_00000001"), line
        events = "".join(LETTERS[event] for event in rank[0]["events"])
        assert re.fullmatch(r"s(Bh)+(h+wrh+kg+sh*){2}h+wrsh*", events), events
