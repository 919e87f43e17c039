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


def dead_link(workspace: Workspace) -> None:
    remove("chat_template.jinja")(workspace)
    os.symlink("nothing", workspace.root / "model/chat_template.jinja")


CASES = [
    # config.json.
    Case("no config.json", "model.path", ("has no config.json",), edit=remove("config.json")),
    Case("no theta", "model/config.json", ("rope_theta 0 is not above 1", "correct the field"), ("engine.backend=fsdp",), fields(rope_parameters={"rope_type": "default", "rope_theta": 0})),
    # Weights.
    Case("lost shard", "model", ("model-00001-of-00002.safetensors", "get the missing files"), edit=lost_shard),
    Case("missing tensor", "model", (f"1 missing ({UP})",), edit=tensors(lambda t: t.pop(UP))),
    # Tokenizer.
    Case("no tokenizer", "model", ("holds no tokenizer", "tokenizer.save_pretrained"), edit=remove("tokenizer.json")),
    Case("a dead link", "model/chat_template.jinja", ("is a link that leads to no file",), edit=dead_link),
    Case("another tokenizer", "rows.jsonl:", ("vocab_size 10", "belongs to the model"), ("model.init=random",), fields(vocab_size=10)),
]  # fmt: skip
