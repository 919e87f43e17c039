"""Identifies the base and the adapters of a checkpoint, because it holds only the adapters."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from mrl.config.schema import RoleConfig
from mrl.engine.collective import on_main
from mrl.engine.stored_weights import Read, stored_weights
from mrl.errors import CheckpointError
from mrl.weights.accounting import SCORE
from mrl.weights.rules import expected_hf_names
from mrl.weights.safetensors_io import SafetensorsReader
from mrl.weights.table import Family, HFConfig

SAMPLES = 64
"""Tensors in a base's fingerprint, with a few rows of each: few enough to read at every start."""
_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_NOT_THE_MODEL = ("export",)


def fingerprint(path: str, family: Family | None, hf_config: HFConfig, head: str) -> str:
    """Returns a hash of some rows of some weights of the folder `path`, the same for any split into files."""
    if family is None:
        return weights_fingerprint(path)
    shapes = expected_hf_names(family, hf_config, head=head)
    with stored_weights(path, family, hf_config, head=head, trained=True) as read:
        return _hash(shapes, read)


def weights_fingerprint(path: str) -> str:
    """Returns a hash as `fingerprint` does, of a folder's tensors by their names in its files."""
    with SafetensorsReader(path) as reader:
        return _hash({name: info.shape for name, info in reader.tensors.items() if info.shape}, reader)


def _hash(shapes: Mapping[str, Sequence[int]], read: Read) -> str:
    digest = hashlib.sha256()
    for name in sample_names(name for name in shapes if name != SCORE):
        digest.update(name.encode())
        for part in _parts(shapes[name]):
            digest.update(read(name)[part].to(torch.float32).numpy().tobytes())
    return digest.hexdigest()[:16]


def sample_names(names: Iterable[str]) -> list[str]:
    """Returns `SAMPLES` of the names, or all, with equally many of each kind (a name without layer and expert).

    A hash of the name chooses. Layers in regular steps would be of one kind if a model repeats a pattern of layers.
    """
    kinds: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()):
        kinds.setdefault(_NUMBER.sub("", name), []).append(name)
    rounds = itertools.zip_longest(*(kinds[kind] for kind in sorted(kinds)))
    chosen = [name for one_of_each in rounds for name in one_of_each if name is not None]
    return sorted(chosen[: max(SAMPLES, len(kinds))])


def _parts(shape: Sequence[int]) -> list[Any]:
    """Returns the parts of a tensor to read.

    A vector is read whole. A matrix is read at three rows: the first, the middle and the last. A stack of matrices is
    read at one row of each of these three matrices.
    """
    if len(shape) == 1:
        return [slice(None)]
    rows = sorted({0, shape[0] // 2, shape[0] - 1})
    return [slice(row, row + 1) if len(shape) == 2 else (row, slice(0, 1), slice(None)) for row in rows]


def identity_of(config: RoleConfig, family: Family | None, hf_config: HFConfig) -> dict[str, Any] | None:
    """Returns a checkpoint's description of its adapters and their base; None without adapters. Collective.

    lora: the section of the config, without how it is exported. path, base: the base's folder, and its `fingerprint`.
    head: "lm" or "value".
    """
    lora, path = config.model.lora, config.model.path
    if lora is None:
        return None
    section = {name: value for name, value in dataclasses.asdict(lora).items() if name not in _NOT_THE_MODEL}
    base = on_main(lambda: fingerprint(path, family, hf_config, config.head))
    return {"lora": section, "path": os.path.abspath(path), "base": base, "head": config.head}


def check_identity(saved: Mapping[str, Any] | None, mine: Mapping[str, Any] | None, folder: str) -> None:
    """Raises CheckpointError if the checkpoint in `folder` is of other adapters, or of these over another base."""
    if saved is None and mine is None:
        return
    if saved is None or mine is None:
        was, now = ("with", "without") if mine is None else ("without", "with")
        fix = "give the saved model.lora" if mine is None else "set model.lora to null"
        raise CheckpointError(folder, why=f"was saved {was} adapters (model.lora), and this run is {now}", fix=fix)
    for name, value in mine["lora"].items():
        if saved["lora"].get(name) != value:
            raise CheckpointError(
                folder,
                why=f"was saved with model.lora.{name} {saved['lora'].get(name)!r}, and this run has {value!r}",
                fix="set the saved value, or start anew",
            )
    if saved["base"] != mine["base"]:
        raise CheckpointError(
            folder,
            why=f"holds adapters over the base model {saved['path']}, and the weights of {mine['path']} are others",
            fix="give the base model as model.path",
        )
