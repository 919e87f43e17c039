"""What the bad-input table is made of: a run that would work, and cases that each break one thing in it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import yaml
from click.testing import CliRunner, Result

from mrl import cli
from tests.forks import forks

REPO = pathlib.Path(__file__).parents[2]

MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 64,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 128, "vocab_size": 256,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip
MOE = {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

CONFIG: dict[str, Any] = {
    "output_dir": "run",
    "model": {"path": "model", "init": "random", "dtype": "float32"},
    "engine": {"device": "cpu"},
    "data": {"train": "rows.jsonl", "max_length": 64},
    "train": {"steps": 2, "global_batch_size": 4},
}

PPO_CONFIG: dict[str, Any] = {
    "output_dir": "run",
    "actor": {"model": {"path": "model", "init": "random", "dtype": "float32"}, "engine": {"device": "cpu"}},
    "rewards": {"functions": [{"name": "gsm8k"}]},
    "rollout": {"samples_per_prompt": 4, "max_new_tokens": 32},
    "algorithm": {"name": "grpo", "mini_batch_size": 4},
    "data": {"train": "rows.jsonl", "max_prompt_length": 32},
    "train": {"steps": 4, "global_batch_size": 8},
}

SERVE_CONFIG: dict[str, Any] = {
    "output_dir": "run", "model": {"path": "model", "init": "random", "dtype": "float32"}, "engine": {"device": "cpu"},
    "serve": {"max_length": 64},
}  # fmt: skip

DPO_CONFIG: dict[str, Any] = {**CONFIG, "loss": {"name": "dpo"}}

RM_CONFIG: dict[str, Any] = {**CONFIG, "loss": {"name": "bradley_terry"}}


@dataclasses.dataclass(frozen=True)
class Workspace:
    """A folder with config.yaml, model/ and rows.jsonl; a case's `edit` breaks something in it."""

    root: pathlib.Path

    def write(self, name: str, text: str | bytes) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())

    def make(self, inputs: pathlib.Path | None = None) -> None:
        """inputs: a folder with model/, which has weights and a tokenizer; without, preflight alone is satisfied."""
        if inputs is not None:
            shutil.copytree(inputs / "model", self.root / "model")
            for name, config in {"config": CONFIG, "dpo": DPO_CONFIG, "rm": RM_CONFIG}.items():
                model = {"model": {"path": "model", "dtype": "float32"}}
                self.write(f"{name}.yaml", yaml.safe_dump(config | model))
            self.write_rows([chat(f"{i}+1=", str(i + 1)) for i in range(4)])
            return
        self.write("config.yaml", yaml.safe_dump(CONFIG))
        self.write("ppo.yaml", yaml.safe_dump(PPO_CONFIG))
        self.write("dpo.yaml", yaml.safe_dump(DPO_CONFIG))
        self.write("rm.yaml", yaml.safe_dump(RM_CONFIG))
        self.write("serve.yaml", yaml.safe_dump(SERVE_CONFIG))
        self.write("model/config.json", json.dumps(MODEL))
        self.write("rows.jsonl", "".join(json.dumps({"prompt": f"{i} + 1 =", "completion": f" {i + 1}"}) + "\n" for i in range(8)))  # fmt: skip

    def write_rows(self, rows: Sequence[Any], name: str = "rows.jsonl") -> None:
        """One line each; strings as they are. Four rows are a batch, so that each of them is in the first."""
        self.write(name, "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))

    def snapshot(self) -> dict[str, bytes]:
        """Every file and what it holds, logs and the bytecode of the user's functions aside."""
        logs = self.root / "run" / "logs"
        return {
            path.relative_to(self.root).as_posix(): path.read_bytes() if path.is_file() else b"(folder)"
            for path in sorted(self.root.rglob("*"))
            if logs not in path.parents and path not in (logs, logs.parent) and "__pycache__" not in path.parts
        }


def chat(question: Any, answer: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **fields}


@dataclasses.dataclass(frozen=True)
class Case:
    """One mistake. key: what the message begins with, a dotted key or file:line; says: words that are in it too."""

    name: str
    key: str
    says: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    edit: Callable[[Workspace], None] | None = None
    others: int = 0  # mistakes of the same parse, a line each


def set_model(**fields: Any) -> Callable[[Workspace], None]:
    """An edit that changes fields of config.json; None takes a field out."""
    content = {k: v for k, v in (MODEL | fields).items() if v is not None}
    return lambda workspace: workspace.write("model/config.json", json.dumps(content))


def set_other_model(name: str, **fields: Any) -> Callable[[Workspace], None]:
    """An edit that adds a second model folder, with weights as far as preflight looks."""

    def edit(workspace: Workspace) -> None:
        workspace.write(f"{name}/config.json", json.dumps(MODEL | fields))
        workspace.write(f"{name}/model.safetensors", b"")

    return edit


def set_config(text: str | bytes) -> Callable[[Workspace], None]:
    """An edit that replaces config.yaml."""
    return lambda workspace: workspace.write("config.yaml", text)


def inherited() -> dict[str, str]:
    """This process's environment, which looks like no launcher's and has no account anywhere."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("SLURM_", "WANDB_")) and k not in ("RANK", "WORLD_SIZE")
    }
    return kept | {"NETRC": os.devnull}


def run_mrl(
    workspace: Workspace,
    *args: str,
    command: str = "sft",
    config: str = "config.yaml",
    environ: dict[str, str] | None = None,
) -> tuple[int, str, str]:
    """`mrl COMMAND CONFIG ARGS` in the workspace: exit code, stdout, stderr."""
    env = inherited() | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | (environ or {})
    done = subprocess.run(
        [sys.executable, "-m", "mrl", command, config, *args],
        cwd=workspace.root, env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def run_forked(
    workspace: Workspace, *args: str, command: str = "sft", config: str = "config.yaml"
) -> tuple[int, str, str]:
    """As `run_mrl`, in a fork of a process that has imported torch and megatron already."""
    environ = inherited() | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as name:
        out, err = pathlib.Path(name, "stdout"), pathlib.Path(name, "stderr")
        code = forks().start(workspace.root, out, environ, [command, config, *args], err).wait(120)
        return code, out.read_text(), err.read_text()


def invoke(workspace: Workspace, *words: str) -> Result:
    """`mrl WORDS` in the workspace and in this process: for dry runs, which start no other and leave nothing behind."""
    gone = dict.fromkeys(os.environ.keys() - inherited().keys())
    with contextlib.chdir(workspace.root):
        return CliRunner(env=gone | {"NETRC": os.devnull, "HF_HUB_OFFLINE": "1"}).invoke(cli.main, words)


def dry_run(
    workspace: Workspace, *args: str, command: str = "sft", config: str = "config.yaml"
) -> tuple[int, str, str]:
    """As `run_mrl` with --dry-run, in this process."""
    done = invoke(workspace, command, config, *args, "--dry-run")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def check(case: Case, workspace: Workspace, run: Callable[..., tuple[int, str, str]] = run_mrl) -> None:
    """Exit code 2, one line on stderr that says what is expected, no traceback, nothing written but a log."""
    if case.edit is not None:
        case.edit(workspace)
    before = workspace.snapshot()
    code, out, err = run(workspace, *case.args)
    assert code == 2, f"exit code {code}\n{out}\n{err}"
    first, *others = err.splitlines()
    assert all(line.startswith("mrl: ") for line in (first, *others)), f"more than one line of one mistake:\n{err}"
    assert len(others) == case.others, f"other mistakes:\n{err}"
    message = first.removeprefix("mrl: ")
    assert message.startswith(case.key), message
    assert all(words in message for words in case.says), f"{case.says} not all in: {message}"
    assert "; " in message, f"says nothing of what would work: {message}"
    assert "Traceback" not in out + err
    assert workspace.snapshot() == before, "something was written"
