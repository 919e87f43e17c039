"""Tiny Hugging Face folders of several shards, with the files that belong to a model."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.convert.cases import load_folder
from tests.engine import tiny

COMPANIONS = {
    "chat_template.jinja": "{{ messages }}\n",
    "tokenizer_config.json": '{"odd   spacing": true}\n',
    "tokenizer.json": "{}\n",
    "generation_config.json": '{"do_sample":   true}\n',
}


def make_hf(
    folder: pathlib.Path, family: str, *, tied: bool = False, dtype: str = "float32", shard: str = "20KB", **fields: Any
) -> pathlib.Path:
    tiny.make_model(str(folder), family, tied=tied, **fields)
    AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).save_pretrained(
        folder, max_shard_size=shard
    )
    if len(list(folder.glob("*.safetensors"))) > 1:
        (folder / "model.safetensors").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config, indent=3))  # as no program here writes it
    return folder


def add_mtp(folder: pathlib.Path, *, layers: int = 1, copies: bool = True) -> dict[str, torch.Tensor]:
    """Adds layers past the last as published DeepSeek-V3 and GLM-4.5 hold them, in a file of their own. Returns their tensors.

    Each has the block of the last layer with other numbers, and, where `copies`, the embedding and the output layer again.
    """
    config = json.loads((folder / "config.json").read_text())
    held, count, hidden = load_folder(str(folder)), config["num_hidden_layers"], config["hidden_size"]
    dtype, generator = held["model.norm.weight"].dtype, torch.Generator().manual_seed(1)
    head = held["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    extra: dict[str, torch.Tensor] = {}
    for layer in range(count, count + layers):
        last, own = f"model.layers.{count - 1}.", f"model.layers.{layer}."
        shapes = {own + n.removeprefix(last): (t.shape, t.dtype) for n, t in held.items() if n.startswith(last)}
        shapes |= {own + f"{name}.weight": ((hidden,), dtype) for name in ("enorm", "hnorm", "shared_head.norm")}
        shapes[own + "eh_proj.weight"] = (hidden, 2 * hidden), dtype
        extra |= {n: torch.randn(shape, generator=generator).to(of) for n, (shape, of) in shapes.items()}
        if copies:
            extra[own + "embed_tokens.weight"] = held["model.embed_tokens.weight"].clone()
            extra[own + "shared_head.head.weight"] = head.clone()
    save_file(extra, folder / "model-mtp.safetensors", {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"] | dict.fromkeys(extra, "model-mtp.safetensors")
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}, indent=1))
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": layers}, indent=3))
    return extra


def add_companions(folder: pathlib.Path) -> None:
    for name, content in COMPANIONS.items():
        (folder / name).write_text(content)


def differences(a: str | pathlib.Path, b: str | pathlib.Path) -> list[str]:
    """Names of tensors of two folders that are not the same bits."""
    one, other = load_folder(str(a)), load_folder(str(b))
    wrong = sorted(one.keys() ^ other.keys())
    return wrong + [
        n for n in one.keys() & other.keys() if one[n].dtype != other[n].dtype or not torch.equal(one[n], other[n])
    ]


def files_of(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
