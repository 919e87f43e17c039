"""Reads the folder of an adapter, as peft writes it, without PyTorch: for checks before a start."""

from __future__ import annotations

import hashlib
from pathlib import Path

from mrl.errors import ModelError
from mrl.weights.json_file import read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE = "base_model_name_or_path"
"""The field of CONFIG with the adapter's base: a folder or hub id."""
MERGE = "merge it with peft (merge_and_unload, then save_pretrained) and give that folder"
"""The advice for an adapter that is more than B A."""


def is_adapter(folder: Path) -> bool:
    """Returns whether `folder` is one that peft loads."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def base_of(folder: Path) -> str:
    """Returns the folder or hub id that an adapter folder names as its base."""
    base = read_json(folder / CONFIG).get(BASE)
    if not isinstance(base, str) or not base:
        raise ModelError(folder / CONFIG, why=f"names no {BASE}", fix="give the base with --model")
    return base


def merged_place(adapter: Path, root: Path) -> Path:
    """Returns the folder below `root` of the model that an adapter folder makes of its base."""
    digest = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        digest.update((adapter / name).read_bytes())
    return root / digest.hexdigest()[:12]
