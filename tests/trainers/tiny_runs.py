"""A tiny model with weights, uneven chat rows, and the config of a run on them."""

from __future__ import annotations

import importlib.util
import json
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import yaml
from torch import Tensor
from transformers import Qwen3ForCausalLM

from mrl import metrics
from tests.engine.harness import run_case

REPO = pathlib.Path(__file__).parents[2]
TRAIN_ROWS, EVAL_ROWS, BATCH = 10, 7, 4


def load_example(name: str) -> Any:
    """A module of examples/, which is no package."""
    path = REPO / "examples" / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_inputs(folder: pathlib.Path) -> None:
    """`folder/model`, with weights, and `train.jsonl` and `eval.jsonl` of sums of one, two and three numbers."""
    example = load_example("arithmetic/make_data.py")
    tokenizer = example.make_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    config = example.make_config(tokenizer)
    config.hidden_size, config.intermediate_size, config.head_dim = 32, 48, 8
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    for name, first, count in (("train", 0, TRAIN_ROWS), ("eval", 100, EVAL_ROWS)):
        write_rows(folder / f"{name}.jsonl", [chat([first + i] * (1 + i % 3)) for i in range(count)])


def write_rows(path: pathlib.Path, rows: Iterable[Any]) -> str:
    """Writes a JSON line for each row. Returns the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read_rows(path: pathlib.Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def chat(numbers: list[int]) -> dict:
    question, answer = "+".join(map(str, numbers)) + "=", str(sum(numbers))
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def make_config(inputs: pathlib.Path, output_dir: pathlib.Path, **changes: Any) -> dict[str, Any]:
    """Plain data of a config. changes: whole sections over it, merged key by key."""
    config: dict[str, Any] = {
        "output_dir": str(output_dir),
        "model": {"path": str(inputs / "model"), "dtype": "float32"},
        "engine": {"backend": "fsdp", "device": "cpu", "micro_batch": {"size": 2}},
        "optimizer": {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1},
        "data": {"train": str(inputs / "train.jsonl"), "max_length": 64},
        "train": {"steps": 8, "global_batch_size": BATCH},
        "log": {"console": "plain"},
    }
    return over(config, changes)


def over(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Whole sections over those of a config, merged key by key."""
    for section, value in changes.items():
        config[section] = {**config.get(section, {}), **value} if isinstance(value, dict) else value
    return config


def write_config(path: pathlib.Path, config: dict[str, Any]) -> pathlib.Path:
    path.write_text(yaml.safe_dump(config))
    return path


def steps(output_dir: pathlib.Path) -> list[dict[str, float]]:
    """metrics.jsonl without timings and memory."""
    rows = metrics.read(pathlib.Path(output_dir) / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not name.startswith("perf/")} for row in rows]


def numbers(output_dir: pathlib.Path) -> list[float]:
    """The losses of a run's steps, then their gradients' norms, of which AdamW would not show a common factor."""
    return [row[name] for name in ("train/loss", "train/grad_norm") for row in steps(output_dir)]


def adamw_numbers(
    model: torch.nn.Module, count: int, loss_of: Callable[[int], Tensor], eps: float = 1e-8
) -> list[float]:
    """What `numbers` has of a run, by torch's AdamW. loss_of: of a step, from 0 on."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=eps, weight_decay=0.0)
    losses, norms = [], []
    for step in range(count):
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses + norms


def assert_goes_on_to_the_bit(
    case: str, config_of: Callable[[pathlib.Path], dict[str, Any]], folder: pathlib.Path, *, step: int, world: int = 1
) -> str:
    """Runs `folder/whole`, and `folder/stopped`, which a signal stops at a step and which goes on: their metrics are equal.
    Returns what the run says that goes on."""
    whole, stopped = config_of(folder / "whole"), config_of(folder / "stopped")
    assert run_case(world, case, config=whole)[:2] == ("done", "")
    assert run_case(world, case, config=stopped, happening="signals", step=step)[0] == "stopped"
    ended, message, said = run_case(world, case, config=stopped)
    assert (ended, message) == ("done", "")
    assert steps(folder / "stopped") == steps(folder / "whole")
    return said
