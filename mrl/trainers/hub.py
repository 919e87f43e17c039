"""A model's folder, wherever the model is."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from typing import Any

import huggingface_hub
from huggingface_hub.errors import LocalEntryNotFoundError

from mrl.data.tokenizer import TOKENIZER_FILES
from mrl.errors import ConfigError, ModelError

FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py")
"""What a model needs: no copies of its weights in other formats."""

NOTES = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Fields of config.json that change nothing here: model.dtype says what the weights are."""


def model_folder(path: str, *, weights: bool = True) -> str:
    """`path` where it is a folder, else the folder of that hub id in the local cache, downloaded where it is not there.

    weights: False leaves them out (a model that starts from scratch). Ranks of a node may call this together: the cache
    has locks.
    """
    folder = os.path.expanduser(path)
    if os.path.exists(folder):
        return folder
    files = [f for f in FILES if weights or f != "*.safetensors"]
    try:
        cached = _cached(path, weights)
        return cached or huggingface_hub.snapshot_download(path, allow_patterns=files)
    except (OSError, ValueError) as error:  # the hub client's own errors are among these
        reason = " ".join(str(error).split())
        raise ModelError(
            f"model.path: value {path!r} is no folder here and cannot be read from the hub ({reason}); give a model folder, "
            "or a hub id that is cached or can be downloaded"
        ) from error


def model_fingerprint(folder: str) -> dict[str, str]:
    """What decides how tokens and weights are used, as hashes: of config.json, but for notes in it, and of the tokenizer's files."""
    config: dict[str, Any] = json.loads(pathlib.Path(folder, "config.json").read_text(encoding="utf-8"))
    told = {name: value for name, value in config.items() if name not in NOTES}
    tokenizer = hashlib.sha256()
    for name in (*TOKENIZER_FILES, "tokenizer_config.json", "chat_template.jinja"):
        path = pathlib.Path(folder, name)
        if path.is_file():
            tokenizer.update(name.encode() + hashlib.sha256(path.read_bytes()).digest())
    text = json.dumps(told, sort_keys=True).encode()
    return {"config.json": hashlib.sha256(text).hexdigest()[:16], "tokenizer": tokenizer.hexdigest()[:16]}


def check_same_model(
    saved: dict[str, str] | None, folder: str, *, before: str, now: str, key: str = "model.path"
) -> None:
    """Refuses a model that is not that of the checkpoint, whose weights would fit it. before, now: the values of `key`.

    saved: the fingerprint in the checkpoint; None where an older version saved it: then the path has to be the same.
    """
    if saved is None and before == now:
        return
    found = model_fingerprint(folder)
    differing = [name for name, value in found.items() if saved is None or saved.get(name) != value]
    if differing:
        raise ConfigError(
            f"{key}: value {now!r} is not the model of the checkpoint, whose {key} was {before!r}: {' and '.join(differing)} "
            "differ; put the model's own files there, or start anew with another output_dir"
        )


def _cached(hub_id: str, weights: bool) -> str | None:
    """The folder in the cache, if it has what is needed: an earlier look at config.json alone makes one, too."""
    try:
        folder = huggingface_hub.snapshot_download(hub_id, local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    names = os.listdir(folder)
    whole = any(n.startswith("tokenizer") for n in names) and any(n.endswith(".safetensors") for n in names) >= weights
    return folder if whole else None
