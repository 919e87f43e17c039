"""Finds a model's folder, wherever the model is."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from collections.abc import Mapping, Sequence

import huggingface_hub
from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError

from mrl.errors import ConfigError, ModelError, first_line, quoted
from mrl.weights.hf_config import reads_images
from mrl.weights.json_file import read_json
from mrl.weights.safetensors_io import INDEX
from mrl.weights.tokenizer_files import TOKENIZER_FILES

FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py", "*.tiktoken", "LICENSE*")
"""The files of a model, without copies of its weights in other formats."""
COPIES = ("*/*.safetensors",)
"""Weights in folders inside: the model again, as another program wants it."""

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "chat_template.json")
"""The files that decide how large an image becomes, and how it is given to the model."""

WEIGHTS = "weights"
"""The part of a fingerprint for weights, if no checkpoint holds them because the model never trains."""

NOTES = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Fields of config.json that change nothing here: model.dtype says what the weights are."""


def model_folder(path: str, *, weights: bool = True, key: str = "model.path") -> str:
    """Returns `path` if it is a folder, else the cached folder of that hub id, downloaded if need be.

    weights: False leaves them out (a model that starts from scratch). key: the user's key for `path`, for messages.
    Ranks of a node may call this together: the cache has locks. Raises ModelError.
    """
    folder = os.path.expanduser(path)
    if os.path.exists(folder):
        return folder
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        # no id: the hub's client would say what an id looks like, and not that the folder is missing
        raise ModelError(key, quoted(path), "does not exist", "give a Hugging Face model folder or a hub id")
    wanted = {"allow_patterns": [f for f in FILES if weights or f != "*.safetensors"], "ignore_patterns": list(COPIES)}
    cached = _cached(path, wanted)
    if cached and _is_whole(cached, weights=weights, tokenizer=True):
        return cached
    try:
        # One request that is not repeated: without a network, the download would retry for half a minute.
        huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(path, "config.json"), timeout=10)
        return huggingface_hub.snapshot_download(path, **wanted)
    except (OSError, ValueError, HTTPError) as error:
        if cached and _is_whole(cached, weights=weights, tokenizer=False):  # who needs a tokenizer says so
            return cached
        raise ModelError(
            key, quoted(path), f"is no folder here and cannot be read from the hub ({first_line(error)})",
            "give a model folder, or a hub id that is cached or can be downloaded",
        ) from error  # fmt: skip


def model_fingerprint(folder: str) -> dict[str, str]:
    """Returns hashes of the files that decide how tokens and weights are used.

    They are of config.json, except notes in it, of the tokenizer's files, and of the processor's if the model reads
    images.
    """
    config = read_json(pathlib.Path(folder, "config.json"))
    fields = {name: value for name, value in config.items() if name not in NOTES}
    text = json.dumps(fields, sort_keys=True).encode()
    hashes = {"config.json": hashlib.sha256(text).hexdigest()[:16]}
    hashes["tokenizer"] = _hash_of(folder, (*TOKENIZER_FILES, "tokenizer_config.json", "chat_template.jinja"))
    if reads_images(config):
        hashes["image processor"] = _hash_of(folder, PROCESSOR_FILES)
    return hashes


def _hash_of(folder: str, names: Sequence[str]) -> str:
    """Returns a hash of those of the files that are there."""
    files = hashlib.sha256()
    for name in names:
        path = pathlib.Path(folder, name)
        if path.is_file():
            files.update(name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return files.hexdigest()[:16]


def check_same_model(
    saved: Mapping[str, str] | None, found: Mapping[str, str], *, before: str, now: str, key: str = "model.path"
) -> None:
    """Refuses another model than the checkpoint's. before, now: the values of `key`.

    found: its fingerprint. saved: the one in the checkpoint. An older version saved None; then the path has to be the
    same.
    """
    if saved is None and before == now:
        return
    unknown = {WEIGHTS} - (saved or {}).keys()  # older versions saved none
    differing = [n for n, value in found.items() if saved is None or (saved.get(n) != value and n not in unknown)]
    if differing:
        raise ConfigError(
            key,
            quoted(now),
            f"is not the model of the checkpoint, whose {key} was {before!r}: {' and '.join(differing)} differ",
            "put the model's own files there, or start anew with another output_dir",
        )


def _cached(hub_id: str, wanted: dict[str, list[str]]) -> str | None:
    """Returns the cached folder of a hub id, whatever it has. An earlier look at config.json alone makes one, too."""
    try:
        return huggingface_hub.snapshot_download(hub_id, local_files_only=True, **wanted)
    except (LocalEntryNotFoundError, ValueError):  # a ValueError: it is no id
        return None


def _is_whole(folder: str, *, weights: bool, tokenizer: bool) -> bool:
    """Returns whether a folder of the cache is complete; a download may have stopped between two files."""
    names = os.listdir(folder)
    if "config.json" not in names or (tokenizer and not any(n.startswith("tokenizer") for n in names)):
        return False
    if not weights:
        return True
    if INDEX not in names:
        return any(name.endswith(".safetensors") for name in names)
    try:
        index = read_json(pathlib.Path(folder, INDEX))
        return set(index["weight_map"].values()) <= set(names)
    except (ModelError, KeyError, TypeError, AttributeError):
        return False
