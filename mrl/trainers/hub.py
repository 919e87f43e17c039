"""A model's folder, wherever the model is."""

from __future__ import annotations

import os

import huggingface_hub
from huggingface_hub.errors import LocalEntryNotFoundError

from mrl.errors import ModelError

FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py")
"""What a model needs: no copies of its weights in other formats."""


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


def _cached(hub_id: str, weights: bool) -> str | None:
    """The folder in the cache, if it has what is needed: an earlier look at config.json alone makes one, too."""
    try:
        folder = huggingface_hub.snapshot_download(hub_id, local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    names = os.listdir(folder)
    whole = any(n.startswith("tokenizer") for n in names) and any(n.endswith(".safetensors") for n in names) >= weights
    return folder if whole else None
