"""Finds the files of a model folder besides its weights: config.json, tokenizer, chat template, generation config,
code.

Links are followed, wherever they lead: the hub's cache is made of links. Folders are left out.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mrl.errors import ModelError
from mrl.weights.json_file import parse_json, read_json

PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "*.tiktoken",
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "*.py",
    "LICENSE*",
)
TEMPLATES = "additional_chat_templates"
"""A folder whose files are chat templates, all of them."""


def companion_files(source: Path) -> list[Path]:
    """Returns the files besides a model's weights. ModelError if one is a dead link, a Git LFS pointer or no JSON."""
    named = [source / name for name in os.listdir(source) if any(fnmatch.fnmatchcase(name, p) for p in PATTERNS)]
    templates = source / TEMPLATES
    if templates.is_dir():
        named += templates.iterdir()
    for file in named:
        if not file.exists():
            raise ModelError(file, why="is a link that leads to no file", fix="get the file again, or remove it")
    files = sorted(file for file in named if not file.is_dir())
    for file in files:
        content = file.read_bytes()
        if content.startswith(b"version https://git-lfs"):
            raise ModelError(file, why="is a pointer of Git LFS", fix="run `git lfs pull` there, or get the file again")
        if file.suffix == ".json":
            try:
                parse_json(content)
            except ValueError as error:
                raise ModelError(file, why=f"not readable as JSON ({error})", fix="get the file again") from None
    return files


def copy_companions(
    source: str | Path, out: str | Path, *, dtype: torch.dtype | None = None, changes: Mapping[str, Any] | None = None
) -> list[str]:
    """Copies the `companion_files` byte for byte, and returns their names.

    config.json alone is edited, and only if it would be untrue. Its dtype changes (in the spelling it has) if the
    weights are written in another one. The keys of `changes` are set; None removes a key.
    """
    source, out = Path(source), Path(out)
    files = companion_files(source)
    for file in files:
        target = out / file.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not (target.exists() and target.samefile(file)):
            shutil.copyfile(file, target)
    config_file = out / "config.json"
    if config_file.is_file():
        config = read_json(config_file)
        wanted = dict(changes or {})
        if dtype is not None:
            wanted |= _dtype_keys(config, dtype)
            text = config.get("text_config")
            if isinstance(text, dict) and "text_config" not in wanted:
                wanted["text_config"] = text | _dtype_keys(text, dtype)
        if any(config.get(key) != value for key, value in wanted.items()):
            edited = {k: v for k, v in (config | wanted).items() if v is not None or k not in wanted}
            config_file.write_text(json.dumps(edited, indent=2) + "\n", encoding="utf-8")
    return [str(file.relative_to(source)) for file in files]


def _dtype_keys(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, str]:
    return {key: str(dtype).removeprefix("torch.") for key in ("dtype", "torch_dtype") if key in config}
