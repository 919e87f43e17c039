"""Tiny Hugging Face folders of several shards, with the files that belong to a model."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import torch
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
