"""Which base and which adapters a checkpoint is of: it holds the adapters alone, and means nothing without the rest."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from typing import Any

import torch

from mrl.config.schema import RoleConfig
from mrl.converters.accounting import SCORE, stored_weights
from mrl.converters.rules import expected_hf_names
from mrl.converters.table import Family, HFConfig
from mrl.engine.collective import on_main
from mrl.errors import CheckpointError

SAMPLES = 64
"""Tensors that a base is told by, spread over all of them, with their first rows: few enough to read at every start."""
_NOT_THE_MODEL = ("export",)


def fingerprint(path: str, family: Family, hf_config: HFConfig, head: str) -> str:
    """A hash of the first rows of some of the weights that the folder `path` has, whatever their files are."""
    names = [name for name in sorted(expected_hf_names(family, hf_config, head=head)) if name != SCORE]
    every, digest = max(1, len(names) // SAMPLES), hashlib.sha256()
    with stored_weights(path, family, hf_config, head=head, trained=True) as read:
        for name in names[::every]:
            digest.update(name.encode() + read(name)[:1].to(torch.float32).numpy().tobytes())
    return digest.hexdigest()[:16]


def facts(config: RoleConfig, family: Family, hf_config: HFConfig) -> dict[str, Any] | None:
    """What a checkpoint says of its adapters; None where there are none. Collective.

    lora: the section of the config, but for how it is exported. path, base: where the base is, and its `fingerprint`.
    head: "lm" or "value".
    """
    lora, path = config.model.lora, config.model.path
    if lora is None:
        return None
    section = {name: value for name, value in dataclasses.asdict(lora).items() if name not in _NOT_THE_MODEL}
    base = on_main(lambda: fingerprint(path, family, hf_config, config.head))
    return {"lora": section, "path": os.path.abspath(path), "base": base, "head": config.head}


def check_facts(saved: Mapping[str, Any] | None, mine: Mapping[str, Any] | None, folder: str) -> None:
    """Raises CheckpointError where the checkpoint in `folder` is of other adapters, or of the same over another base."""
    if saved is None and mine is None:
        return
    if saved is None or mine is None:
        was, now = ("with", "without") if mine is None else ("without", "with")
        fix = "give the saved model.lora" if mine is None else "set model.lora to null"
        raise CheckpointError(f"{folder}: was saved {was} adapters (model.lora), and this run is {now}; {fix}")
    for name, value in mine["lora"].items():
        if saved["lora"].get(name) != value:
            raise CheckpointError(
                f"{folder}: was saved with model.lora.{name} {saved['lora'].get(name)!r}, and this run has {value!r}; "
                "set the saved value, or start anew"
            )
    if saved["base"] != mine["base"]:
        raise CheckpointError(
            f"{folder}: holds adapters over the base model {saved['path']}, and the weights of {mine['path']} are others; "
            "give the base model as model.path"
        )
