"""Tiny policies, prompts, and the config of a run on them.

The models draw from 23 tokens, a number that neither 2 nor a tile divides (trap 13): megatron pads it under every layout.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from tests.engine.harness import run_case
from tests.trainers import tiny_runs
from tests.trainers.tiny_runs import read_rows, steps

VOCAB, TRAIN_ROWS, EVAL_ROWS, SEQUENCES, MINI_BATCH = 23, 10, 3, 12, 6
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}


def make_inputs(folder: pathlib.Path) -> None:
    """`folder/model`, `moe`, `other` (other weights) and `scorer` (a sequence classifier), and prompts for train and eval."""
    tokenizer = tiny_runs.load_example("arithmetic/make_data.py").make_tokenizer()
    _save(folder / "model", tokenizer, "qwen3", seed=0)
    _save(folder / "other", tokenizer, "qwen3", seed=1)
    _save(folder / "moe", tokenizer, "qwen3_moe", seed=0, **EXPERTS)
    _save(folder / "scorer", tokenizer, "qwen3", seed=2, head=AutoModelForSequenceClassification)
    for name, first, count in (("train", 0, TRAIN_ROWS), ("eval", 100, EVAL_ROWS)):
        tiny_runs.write_rows(folder / f"{name}.jsonl", [prompt([first + i] * (1 + i % 3)) for i in range(count)])


def prompt(numbers: list[int]) -> dict[str, str]:
    return {"prompt": "+".join(map(str, numbers)) + "=", "answer": str(sum(numbers))}


def rewards_by(folder: pathlib.Path, body: str) -> dict[str, Any]:
    """The section `rewards` with a function of (prompt, completion, row), whose file is in `folder`."""
    file = folder / "rewards.py"
    file.write_text(f"def score(prompt, completion, row):\n    {body}\n")
    return {"functions": [{"function": f"{file}:score"}], "workers": 1}


def rows_of_two(inputs: pathlib.Path, folder: pathlib.Path, every: int) -> tuple[list[dict[str, str]], str]:
    """The rows of `inputs`, of which each `every`-th names a second teacher, and their file in `folder`."""
    rows = enumerate(read_rows(inputs / "train.jsonl"))
    named = [{**row, "teacher": "second"} if i % every == every - 1 else row for i, row in rows]
    return named, tiny_runs.write_rows(folder / "rows.jsonl", named)


def _save(
    folder: pathlib.Path,
    tokenizer: PreTrainedTokenizerFast,
    family: str,
    *,
    seed: int,
    head: Any = AutoModelForCausalLM,
    **fields: Any,
) -> None:
    tokenizer.save_pretrained(folder)
    config = AutoConfig.for_model(
        family, vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, tie_word_embeddings=False, initializer_range=0.15,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **fields,
    )  # fmt: skip
    if head is not AutoModelForCausalLM:
        config.num_labels = 1
    torch.manual_seed(seed)
    model = head.from_config(config, dtype=torch.float32)
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.15)  # transformers leaves the pad token's at 0
    model.save_pretrained(folder)


def engine(backend: str = "fsdp", size: int = 3, **degrees: Any) -> dict[str, Any]:
    """A role's engine section. size: sequences of a micro-batch."""
    return {"backend": backend, "device": "cpu", "parallel": degrees, "micro_batch": {"size": size}}


def make_config(inputs: pathlib.Path, output_dir: pathlib.Path, name: str = "grpo", **changes: Any) -> dict[str, Any]:
    """Plain data of a config: one iteration of two steps. changes: whole sections over it, merged key by key."""
    optimizer = {"lr": 1e-3, "eps": 1e-6, "schedule": "constant", "warmup_steps": 0}
    config: dict[str, Any] = {
        "output_dir": str(output_dir),
        "actor": {
            "model": {"path": str(inputs / "model"), "dtype": "float32"},
            "engine": engine(),
            "optimizer": optimizer,
        },
        "rollout": {"samples_per_prompt": 3, "max_new_tokens": 8, "temperature": 0.8},
        "algorithm": {"name": name, "mini_batch_size": MINI_BATCH},
        "rewards": {
            "functions": [{"name": "length", "maximum": 4, "slack": 20}, {"name": "exact_match", "weight": 0.0}],
            "workers": 1,
        },
        "data": {"train": str(inputs / "train.jsonl"), "max_prompt_length": 32},
        "train": {"steps": 2, "global_batch_size": SEQUENCES},
        "log": {"console": "plain"},
    }
    if name == "ppo":
        config["critic"] = {"optimizer": {**optimizer, "lr": 1e-2}}
    if name == "opd":
        del config["rewards"]
        config["reference"] = {"model": {"path": str(inputs / "other")}}
    return merge(config, changes)


def merge(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` over `config`: mappings key by key, everything else as a whole."""
    made = dict(config)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(made.get(key), Mapping) and key != "engine"
        made[key] = merge(made[key], value) if both else value
    return made


def train(config: Mapping[str, Any], world: int = 1, ended: str = "done", **happening: Any) -> str:
    """Runs `mrl ppo` in a world of ranks. Returns what it says, or its last line where it is not to end well."""
    found = run_case(world, "tests.trainers.rl.cases:train", config=config, **happening)
    assert found[0] == ended, found
    return found[2] if ended == "done" else found[1]


TIMED = "rollout/tokens_per_s"
"""The metric outside of perf/ that is a time."""


def metrics_of(output_dir: pathlib.Path) -> list[dict[str, float]]:
    """metrics.jsonl without timings and memory."""
    return [{name: value for name, value in row.items() if name != TIMED} for row in steps(output_dir)]


def samples_of(output_dir: pathlib.Path) -> dict[str, list[dict[str, Any]]]:
    """File name -> its objects, of all samples that a run has written."""
    files = sorted((output_dir / "samples").glob("*.jsonl"))
    return {file.name: read_rows(file) for file in files}


def weights_of(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def assert_close_metrics(actual: list[dict[str, float]], expected: list[dict[str, float]], bound: float) -> None:
    """Each within `bound`, absolute for numbers below 1 and relative above."""
    assert [row.keys() for row in actual] == [row.keys() for row in expected]
    wrong = [
        f"step {row['step']}: {name}: {row[name]!r}, not {value!r}"
        for row, other in zip(actual, expected, strict=True)
        for name, value in other.items()
        if not math.isclose(row[name], value, rel_tol=bound, abs_tol=bound)
    ]
    assert expected and not wrong, "\n".join(wrong)
