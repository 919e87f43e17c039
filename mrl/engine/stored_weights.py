"""Reads the weights of a model's folder by Hugging Face name, also of a folder that `mrl convert import` made."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from mrl.engine.torch_dist.reader import TorchDistReader
from mrl.errors import ModelError
from mrl.weights.accounting import OWN_COUNT, SCORE, check_model, mtp_tensors, num_mtp_layers
from mrl.weights.composites import CarriedReader
from mrl.weights.mcore_weights import FOLDER, McoreReader, check_architecture, is_imported, read_description
from mrl.weights.rules import expected_hf_names
from mrl.weights.safetensors_io import INDEX, SINGLE, SafetensorsReader
from mrl.weights.stacks import unstack_experts
from mrl.weights.table import Family, HFConfig
from mrl.words import pluralize, shorten_list

logger = logging.getLogger(__name__)

Read = Callable[[str], Any]
"""Gives a tensor, or a lazy slice of a file's, by its Hugging Face name."""


@contextlib.contextmanager
def stored_weights(
    path: str, family: Family, hf_config: HFConfig, *, head: str, trained: bool, mtp: int = 0
) -> Iterator[Read]:
    """Gives a reader of the folder `path`: Hugging Face name -> tensor or lazy slice. All its tensors are accounted
    for.

    path: a Hugging Face folder, or one that `mrl convert import` made.

    trained: if the folder has no value head, one that will train starts at zero. mtp: how many MTP layers to read too;
    without any they are left unread.
    """
    imported = is_imported(path)
    with contextlib.closing(open_imported(path, family, hf_config) if imported else SafetensorsReader(path)) as stored:
        reader = stored if imported else unstack_experts(stored, family)
        may_lack = [SCORE] if head == "value" and trained else []
        absent = check_model(reader, family, hf_config, head=head, may_lack=may_lack, carried=mtp > 0)
        lacks = expected_hf_names(family, hf_config, head=head, mtp=mtp).keys() - reader.tensors.keys() - set(may_lack)
        if mtp and lacks:
            raise ModelError(
                path, why=f"lacks {shorten_list(sorted(lacks))} of its MTP layers", fix="leave out model.mtp"
            )
        zeros = torch.zeros(1, hf_config["hidden_size"])
        yield lambda name: zeros if name in absent else reader(name)


def mtp_tensors_of_folder(path: str | Path, family: Family, hf_config: HFConfig) -> list[str]:
    """Returns the tensors of MTP layers that engines leave unread and out of exports.

    path: a folder, Hugging Face or imported.
    """
    if not num_mtp_layers(hf_config) or OWN_COUNT in hf_config:
        return []
    if is_imported(path):
        with contextlib.closing(open_imported(path, family, hf_config)) as reader:
            return mtp_tensors(reader.tensors, hf_config)
    if not any((Path(path) / name).is_file() for name in (SINGLE, INDEX)):
        return []  # only a config.json, to start from scratch
    with SafetensorsReader(path) as reader:
        return mtp_tensors(unstack_experts(reader, family).tensors, hf_config)


def say_carried(model: str, names: Collection[str]) -> None:
    """Logs which tensors of its folder a model leaves alone, if there are any."""
    if names:
        logger.warning(
            "%s does not read %s of its folder: they do not train, and exports hold them unchanged (%s)",
            model,
            pluralize(len(names), "tensor"),
            shorten_list(sorted(names)),
        )


def open_imported(
    path: str | Path, family: Family, hf_config: HFConfig, companions: str | Path | None = None
) -> McoreReader:
    """Opens the weights of a folder of `mrl convert import` or of a checkpoint of the Megatron engine.

    companions: the folder that `hf_config` is from, if it is another.
    """
    about = read_description(path)["architecture"]
    check_architecture(about, family, hf_config, companions or path)
    stored = TorchDistReader(Path(path) / FOLDER)
    beside = CarriedReader(companions or path, family)
    return McoreReader(stored, family, hf_config, beside, spec=about["layer_spec"], head=about["head"])
