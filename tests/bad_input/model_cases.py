"""Model folders that cannot be trained: files that are not there, broken, or do not belong together."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.bad_input.mistakes import Case, Workspace

UP = "model.layers.0.mlp.up_proj.weight"


def fields(**changes: Any) -> Callable[[Workspace], None]:
    """An edit of config.json."""

    def edit(workspace: Workspace) -> None:
        content = json.loads((workspace.root / "model/config.json").read_text())
        workspace.write("model/config.json", json.dumps(content | changes))

    return edit


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Workspace], None]:
    """An edit of the weights."""

    def edit(workspace: Workspace) -> None:
        path = workspace.root / "model/model.safetensors"
        content = {name: tensor.clone() for name, tensor in load_file(path).items()}
        change(content)
        save_file(content, path, metadata={"format": "pt"})

    return edit


def lost_shard(workspace: Workspace) -> None:
    path = workspace.root / "model/model.safetensors"
    index = {"metadata": {}, "weight_map": {name: "model-00001-of-00002.safetensors" for name in load_file(path)}}
    workspace.write("model/model.safetensors.index.json", json.dumps(index))
    os.rename(path, workspace.root / "model/model-00002-of-00002.safetensors")


def file(name: str, content: str | bytes) -> Callable[[Workspace], None]:
    return lambda workspace: workspace.write(f"model/{name}", content)


def remove(*names: str) -> Callable[[Workspace], None]:
    return lambda workspace: [(workspace.root / "model" / name).unlink() for name in names]


def fifo(workspace: Workspace) -> None:
    remove("chat_template.jinja")(workspace)
    os.mkfifo(workspace.root / "model/chat_template.jinja")


def run_of_adapters(workspace: Workspace) -> None:
    remove("config.json")(workspace)
    workspace.write("model/hf/adapter_config.json", "{}")


CASES = [
    # config.json.
    Case("no config.json", "model.path", ("has no config.json",), edit=remove("config.json")),
    Case("run of adapters", "model.path", ("has no config.json; it is the folder of a run: give ", "model/hf"), edit=run_of_adapters),
    Case("cut config.json", "model/config.json", ("not readable as JSON",), edit=file("config.json", '{"model_type": ')),
    Case("list in config.json", "model/config.json", ("holds a JSON list",), edit=file("config.json", "[]")),
    Case("unknown family", "config.json", ("'gpt2' is not supported", "qwen3"), edit=fields(model_type="gpt2")),
    Case("unknown activation", "config.json", ("hidden_act = 'gelu'", "'silu'"), edit=fields(hidden_act="gelu")),
    Case("unknown field", "config.json", ("logit_scale = 3.0", "engine.backend=fsdp"), edit=fields(logit_scale=3.0)),
    Case("yarn", "config.json", ("'yarn'", "llama3"), edit=fields(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32})),
    Case("layer types", "model/config.json", ("layer_types", "correct the field"), edit=fields(num_hidden_layers=3)),
    Case("no layers", "model/config.json", ("num_hidden_layers", "at least 1"), edit=fields(num_hidden_layers=0)),
    Case("no theta", "model/config.json", ("rope_parameters.rope_theta = 0 is not a number above 1", "correct the field"), ("engine.backend=fsdp",), fields(rope_parameters={"rope_type": "default", "rope_theta": 0})),
    Case("no heads", "model/config.json", ("num_attention_heads = 0 is not a whole number",), edit=fields(num_attention_heads=0)),
    Case("nested config.json", "model/config.json", ("not readable as JSON",), edit=lambda w: w.write("model/config.json", "[" * 30_000 + "]" * 30_000)),
    # Weights.
    Case("no weights", "model.path", ("*.safetensors",), edit=remove("model.safetensors")),
    Case("cut weights", "model/model.safetensors", ("header promises", "get the file again"), edit=lambda w: os.truncate(w.root / "model/model.safetensors", 5000)),
    Case("garbled weights", "model/model.safetensors", ("not a safetensors",), edit=file("model.safetensors", b"abc")),
    Case("lost shard", "model", ("model-00001-of-00002.safetensors", "get the missing files"), edit=lost_shard),
    Case("garbled index", "model/model.safetensors.index.json", ("not a safetensors index",), edit=file("model.safetensors.index.json", "{}")),
    Case("missing tensor", "model", (f"1 missing ({UP})",), edit=tensors(lambda t: t.pop(UP))),
    Case("unknown tensor", "model", ("1 left over (extra.weight)",), edit=tensors(lambda t: t.update({"extra.weight": torch.zeros(2)}))),
    Case("wrong shape", "model", (f"{UP} is [3, 3], not [48, 32]",), edit=tensors(lambda t: t.update({UP: torch.zeros(3, 3)}))),
    Case("integer weights", "model", (f"{UP} is I32",), edit=tensors(lambda t: t.update({UP: t[UP].int()}))),
    Case("weights for fsdp", "model", (f"1 missing ({UP})",), ("engine.backend=fsdp",), tensors(lambda t: t.pop(UP))),
    # Tokenizer.
    Case("no tokenizer", "model", ("holds no tokenizer", "tokenizer.save_pretrained"), edit=remove("tokenizer.json")),
    Case("a FIFO for a template", "model/chat_template.jinja", ("is a FIFO",), edit=fifo),
    Case("garbled tokenizer", "model", ("the tokenizer cannot be loaded",), edit=file("tokenizer.json", "{")),
    Case("another tokenizer", "rows.jsonl:", ("vocab_size 10", "belongs to the model"), ("model.init=random",), fields(vocab_size=10)),
]  # fmt: skip
