"""Runs of the real command line on tiny models and generated rows, and what they leave compared bit by bit."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import random
import subprocess
import sys
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import yaml
from safetensors.torch import load_file
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from mrl import metrics
from mrl.config.load import read_yaml
from tests.engine import tiny
from tests.engine.harness import run_case
from tests.trainers.tiny_runs import REPO, load_example, over

ROWS, BATCH, STEPS = 26, 4, 12
TIMEOUT_S = 240
FAMILIES = {
    "dense": ("llama", {"layers": 2, "attention_dropout": 0.1}),
    "tied": ("qwen3", {"layers": 2, "tied": True, "attention_dropout": 0.1}),
    "moe": ("qwen3_moe", {"layers": 2, "attention_dropout": 0.1}),
    "plain": ("qwen3", {"layers": 2, "tied": True}),
    "wide": ("qwen3", {"layers": 2, "tied": True, "hidden_size": 128, "intermediate_size": 512}),
    "plain moe": ("qwen3_moe", {"layers": 2}),
    "plain delta": ("qwen3_5", {"layers": 2, "tied": True}),
}
"""Dropout draws from the RNG in every step, so that a generator that is not restored shows; those of "plain" and "wide" have none."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """world: processes. parallel: degrees other than 1. model: a key of FAMILIES. lora: adapters alone train."""

    world: int
    model: str = "dense"
    backend: str = "megatron"
    parallel: dict[str, int] = dataclasses.field(default_factory=dict)
    lora: dict[str, Any] | None = None


LORA = {"rank": 4, "alpha": 8.0, "dropout": 0.1}
LAYOUTS = {
    "tp1": Layout(1),
    "tp2": Layout(2, parallel={"tp": 2}),
    "pp2 tied": Layout(2, "tied", parallel={"pp": 2}),
    "dp2": Layout(2),
    "ep2": Layout(2, "moe", parallel={"ep": 2}),
    "fsdp dp2": Layout(2, backend="fsdp"),
    "fsdp cp2": Layout(2, backend="fsdp", parallel={"cp": 2}),
    "delta tp2": Layout(2, "plain delta", parallel={"tp": 2}),
    "delta cp2": Layout(2, "plain delta", parallel={"cp": 2}),
    "delta fsdp dp2": Layout(2, "plain delta", backend="fsdp"),
    "lora tp2": Layout(2, parallel={"tp": 2}, lora=LORA),
    "lora ep2": Layout(2, "moe", parallel={"ep": 2}, lora=LORA | {"dropout": 0.0}),  # of experts: no dropout
    "lora fsdp dp2": Layout(2, backend="fsdp", lora=LORA),
}


def make_inputs(folder: pathlib.Path) -> pathlib.Path:
    """Models under `folder/NAME` with the odd vocabulary of tests/engine/tiny.py, and rows of uneven length."""
    tokenizer = load_example("arithmetic/make_data.py").make_tokenizer()
    for name, (family, fields) in FAMILIES.items():
        tiny.make_model(str(folder / name), family, **fields)
        tokenizer.save_pretrained(folder / name)
    rng = random.Random(0)
    for part, count in (("train", ROWS), ("eval", 6)):
        rows = [[rng.randrange(3, len(tokenizer)) for _ in range(rng.randint(4, 24))] for _ in range(count)]
        lines = [json.dumps({"input_ids": row, "loss_mask": [0, 0, *[1] * (len(row) - 2)]}) + "\n" for row in rows]
        (folder / f"{part}.jsonl").write_text("".join(lines))
    return folder


def make_config(inputs: pathlib.Path, output_dir: pathlib.Path, layout: Layout, **changes: Any) -> dict[str, Any]:
    """Plain data of a config. changes: whole sections over it, merged key by key."""
    config: dict[str, Any] = {
        "output_dir": str(output_dir),
        "seed": 7,
        "model": {"path": str(inputs / layout.model), "dtype": "float32", "lora": layout.lora},
        "engine": {"backend": layout.backend, "device": "cpu", "parallel": layout.parallel, "micro_batch": {"size": 2}},
        "optimizer": {"lr": 5e-3, "schedule": "cosine", "warmup_steps": 3, "weight_decay": 0.1, "eps": 1e-6},
        "data": {"train": str(inputs / "train.jsonl"), "eval": str(inputs / "eval.jsonl"), "max_length": 32},
        "train": {"steps": STEPS, "global_batch_size": BATCH, "eval_every": 5},
        "checkpoint": {"every": 1},
        "log": {"console": "plain"},
    }
    return over(config, changes)


# ------------------------------------------------------------------------------------------------- the command line


@dataclasses.dataclass
class Run:
    """One command, started again and again: `mrl sft config.yaml --nproc N` with its output in `folder/run`."""

    folder: pathlib.Path
    config: dict[str, Any]
    world: int
    command: str = "sft"

    @property
    def output(self) -> pathlib.Path:
        return pathlib.Path(self.config["output_dir"])

    def start(self, *overrides: str) -> subprocess.Popen[str]:
        """The launcher, in a session of its own; its output goes to files."""
        path = self.folder / "config.yaml"
        path.write_text(yaml.safe_dump(self.config))
        env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_") and k not in ("RANK", "WORLD_SIZE")}
        env |= {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "mrl", self.command, str(path), *overrides, "--nproc", str(self.world)]
        with open(self.folder / "out", "w") as out, open(self.folder / "err", "w") as err:
            return subprocess.Popen(command, cwd=self.folder, env=env, stdout=out, stderr=err, start_new_session=True)

    def finish(self, process: subprocess.Popen[str]) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        code = process.wait(timeout=TIMEOUT_S)
        return code, (self.folder / "out").read_text(), (self.folder / "err").read_text()

    def to_the_end(self, *overrides: str) -> str:
        """Runs until done. Returns what was printed."""
        code, out, err = self.finish(self.start(*overrides))
        assert code == 0, f"exit code {code}\n{out}\n{err}"
        return out


def new_run(folder: pathlib.Path, inputs: pathlib.Path, layout: Layout, **changes: Any) -> Run:
    folder.mkdir(parents=True, exist_ok=True)
    return Run(folder, make_config(inputs, folder / "run", layout, **changes), layout.world)


# ----------------------------------------------------------------------------------------------------- comparison


def steps(output: pathlib.Path) -> list[dict[str, float]]:
    """metrics.jsonl without timings and memory."""
    rows = metrics.read(output / "metrics.jsonl")
    timed = lambda name: name.startswith("perf/") or name == "rollout/tokens_per_s"  # noqa: E731
    return [{name: value for name, value in row.items() if not timed(name)} for row in rows]


def updates(output: pathlib.Path) -> list[dict[str, float]]:
    """Those of `steps` that are of an optimizer step, and not of the evaluation before training."""
    return [row for row in steps(output) if row["step"] > 0]


def rollouts(output: pathlib.Path) -> dict[str, list[str]]:
    """The files of samples/, in lines."""
    return {path.name: path.read_text().splitlines() for path in sorted((output / "samples").glob("*"))}


def newest(output: pathlib.Path) -> pathlib.Path:
    """The checkpoint that `latest` names."""
    return output / "checkpoints" / (output / "checkpoints" / "latest").read_text().strip()


def sharded_tensors(checkpoint: pathlib.Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole: parameters, master weights and moments, under their names.

    Where it holds several roles, `ROLE.` stands before each name.
    """
    tensors: dict[str, torch.Tensor] = {}
    for metadata in sorted(checkpoint.rglob(".metadata")):
        folder, found = metadata.parent, {}
        _load_state_dict(found, dcp.FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
        role = "".join(f"{part}." for part in folder.relative_to(checkpoint).parts if part != "mcore")
        tensors |= {role + name: value for name, value in flat(found) if isinstance(value, torch.Tensor)}
    return tensors


def flat(tree: Any, name: str = "") -> Any:
    """(dotted name, leaf) of nested dicts and lists."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list | tuple) else None
    if items is None:
        yield name, tree
        return
    for key, value in items:
        yield from flat(value, f"{name}.{key}" if name else str(key))


def small_state(checkpoint: pathlib.Path) -> dict[str, Any]:
    """What is beside the tensors: RNG of every rank, schedule, step counts, position in the data, trained tokens."""
    found: dict[str, Any] = {}
    for path in sorted(checkpoint.rglob("*.pt")):
        if path.parent.name == "mcore":  # megatron's own note of its format
            continue
        state = torch.load(path, weights_only=True)
        if state.get("state"):  # the trainer's: this run's folder, and an id that is random by design
            for name in ("output_dir", "checkpoint"):
                state["state"]["config"].pop(name)
            state["state"]["progress"].pop("run_id")
        found |= dict(flat(state, path.relative_to(checkpoint).as_posix()))
    return found


def assert_same_state(a: dict[str, Any], b: dict[str, Any], what: str) -> None:
    """Bitwise, and the same names; says which differ."""
    assert a.keys() == b.keys(), f"{what}: {sorted(a.keys() ^ b.keys())}"
    differ = [name for name in a if not _equal(a[name], b[name])]
    assert not differ, f"{what}: {len(differ)} of {len(a)} differ: {differ[:5]}"


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and a == b


def assert_same_run(a: pathlib.Path, b: pathlib.Path) -> None:
    """The same result, the same checkpoints kept and nothing half made, the same config."""
    assert_same_result(a, b)
    saved = [sorted(p.name for p in (o / "checkpoints").iterdir()) for o in (a, b)]
    assert saved[0] == saved[1] and not any(name.startswith(".") for name in saved[0]), saved
    ours, theirs = (read_yaml(o / "config.yaml") | {"output_dir": ""} for o in (a, b))
    for config in (ours, theirs):
        config["checkpoint"].pop("background")  # another way to the same files
    assert ours == theirs


def assert_same_steps(a: pathlib.Path, b: pathlib.Path) -> None:
    """Metrics but for timings; says where they part."""
    for ours, theirs in zip(steps(a), steps(b), strict=True):
        differ = {name: (ours.get(name), theirs.get(name)) for name in ours.keys() | theirs.keys()}
        differ = {name: pair for name, pair in differ.items() if pair[0] != pair[1]}
        assert not differ, f"step {ours['step']:.0f}: {differ}"


def assert_same_result(a: pathlib.Path, b: pathlib.Path) -> None:
    """Metrics but for timings, rollouts and export byte by byte, and everything in the last checkpoint: equal."""
    assert_same_steps(a, b)
    assert rollouts(a) == rollouts(b)
    exports = [{p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in (o / "hf").iterdir()} for o in (a, b)]
    assert exports[0] == exports[1] and exports[0].keys() & {"model.safetensors", "adapter_model.safetensors"}
    assert newest(a).name == newest(b).name
    tensors = [sharded_tensors(newest(o)) for o in (a, b)]
    assert any("exp_avg_sq" in name for name in tensors[0]), "no optimizer state"
    assert_same_state(*tensors, "tensors of the checkpoint")
    assert_same_state(*(small_state(newest(o)) for o in (a, b)), "state of the checkpoint")


def exported(output: pathlib.Path) -> dict[str, torch.Tensor]:
    """The exported model: Hugging Face name -> tensor."""
    return load_file(output / "hf" / "model.safetensors")


# ------------------------------------------------------------------------------- without a command, in waiting processes


def train(config: dict[str, Any], world: int, **happening: Any) -> tuple[str, str, str]:
    """The trainer in the processes of tests/engine/harness.py: how it ended, its message, and what it printed."""
    return run_case(world, "tests.trainers.cases:train", config=config, **happening)


def stop_after(config: dict[str, Any], world: int, step: int) -> None:
    """Trains until a signal in `step`; what is made is saved."""
    ended, message, _ = train(config, world, happening="signals", step=step)
    assert ended == "stopped", message


def finish(config: dict[str, Any], world: int) -> str:
    """Trains to the end. Returns what was printed."""
    ended, message, said = train(config, world)
    assert ended == "done", message
    return said
