"""Makes the model folder of a check. Dropout is 0 in it.

It is the user's own, by links where transformers can read it as it is, or a cut of it with random weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from mrl.check.cut import ModelCut, cut_config, without_dropout
from mrl.check.reference import HEADS
from mrl.engine.stored_weights import open_imported
from mrl.errors import ModelError, quoted
from mrl.weights.accounting import SCORE
from mrl.weights.companions import companion_files
from mrl.weights.composites import COMPOSITES
from mrl.weights.families import family_for, family_of
from mrl.weights.hf_config import normalize, reads_images
from mrl.weights.json_file import read_json
from mrl.weights.mcore_weights import is_imported
from mrl.weights.random_weights import RandomWeights
from mrl.weights.reader import WeightReader
from mrl.weights.rules import expected_hf_names, value_head_config
from mrl.weights.safetensors_io import INDEX, HFWriter, SafetensorsReader, TensorInfo, tensor_infos

NOISE = 0.1
"""Deviation of norms and biases of a cut model from 1 and 0, so that a forgotten one shows."""

Head = Literal["lm", "value"]


@dataclasses.dataclass(frozen=True)
class CheckedModel:
    """Is the folder that engines and transformers load."""

    path: str
    parameters: int
    init: Literal["pretrained", "random"]  # how an engine comes to its weights; they are those of the folder
    words: str  # what it is, in words


def count_parameters(raw: Mapping[str, Any], head: Head) -> int:
    """Returns the parameters of the model of a config.json."""
    config = normalize(raw)
    if (family := family_of(config["model_type"])) is not None:
        shapes = expected_hf_names(family, config, head=head)
        return sum(math.prod(shape) for shape in shapes.values())
    with torch.device("meta"):
        model = _transformers_model(config, head)
    return sum(parameter.numel() for parameter in model.parameters())


def make_folder(
    source: str, out: str, *, cut: ModelCut, head: Head, init: Literal["pretrained", "random"], seed: int
) -> CheckedModel:
    """Makes the folder `out` of the model in the folder `source`.

    init: as model.init has it; a cut model has random weights in any case. Raises ModelError.
    """
    raw = read_json(Path(source, "config.json"))
    changed = without_dropout(cut_config(raw, cut))
    config = normalize(changed, where=os.path.join(source, "config.json"))
    if head == "value":
        changed |= value_head_config(config)
        config |= value_head_config(config)
    Path(out).mkdir(parents=True)
    for file in companion_files(Path(source)):
        target = Path(out, file.relative_to(source))
        target.parent.mkdir(exist_ok=True)
        if file.name != "config.json":
            target.symlink_to(file.resolve())
    Path(out, "config.json").write_text(json.dumps(changed, indent=1), encoding="utf-8")
    count = count_parameters(changed, head)
    size = f"{config['model_type']}, {count / 1e6:,.3g}M parameters"
    if cut or init == "random":
        of_engine = _write_random(out, config, head=head, seed=seed, noise=NOISE if cut else 0.0)
        words = f"cut to {cut}: {size}, random weights" if cut else f"{size}, random weights as in the run"
        return CheckedModel(out, count, "random" if of_engine and not cut else "pretrained", words)
    if raw.get("quantization_config"):
        why = "is quantised, and transformers computes such a model in another way"
        raise ModelError("model.path", quoted(source), why, "give --cut layers=4, whose weights are random")
    if is_imported(source):
        with contextlib.closing(open_imported(source, family_for(config), config)) as reader:
            _copy_weights(reader, out, config, head, seed)
    elif head == "value":
        with SafetensorsReader(source) as reader:
            _copy_weights(reader, out, config, head, seed)
    else:
        _link_weights(source, out)
    return CheckedModel(out, count, "pretrained", f"{size}, its own weights")


def _link_weights(source: str, out: str) -> None:
    """Links the weights of a Hugging Face folder."""
    with SafetensorsReader(source) as reader:
        files = {info.file for info in reader.tensors.values()}
    for name in (*files, INDEX):
        if Path(source, name).exists():
            Path(out, name).symlink_to(Path(source, name).resolve())


def _copy_weights(reader: WeightReader, out: str, config: Mapping[str, Any], head: Head, seed: int) -> None:
    """Writes weights as transformers reads them.

    A missing value head gets random weights. A run starts it from zeros, and then nothing below it would have a
    gradient.
    """
    infos = dict(reader.tensors)
    if head == "value":
        text = config.get("text_config") or config
        infos.setdefault(SCORE, TensorInfo("F32", (1, text["hidden_size"])))
    random = _random({name: info.shape for name, info in infos.items()}, config, seed)
    with HFWriter(out, infos) as writer:
        for name in infos:
            writer.add(name, reader(name)[()] if name in reader.tensors else random(name))


def _write_random(out: str, config: dict[str, Any], *, head: Head, seed: int, noise: float) -> bool:
    """Writes random weights. Returns whether they are those that an engine starts from with model.init random."""
    if (family := family_of(config["model_type"])) is None:  # of which transformers alone knows how it begins
        torch.manual_seed(seed)
        model = _transformers_model(config, head)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if noise and (parameter.ndim < 2 or name.endswith("bias")):
                    parameter += _noise(name, parameter.shape, noise, seed)
        kept = Path(out, "config.json").read_bytes()
        model.save_pretrained(out)
        Path(out, "config.json").write_bytes(kept)
        return False
    shapes = expected_hf_names(family, config, head=head)
    random = _random(shapes, config, seed)
    with HFWriter(out, tensor_infos(shapes, torch.float32)) as writer:
        for name in shapes:
            tensor = random(name)
            if noise and (tensor.ndim < 2 or name.endswith("bias")):
                tensor = tensor + _noise(name, tensor.shape, noise, seed)
            writer.add(name, tensor)
    # of a composite an engine makes the text part alone; it starts a value head from zeros
    return config["model_type"] not in COMPOSITES and head == "lm"


def _random(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], seed: int) -> RandomWeights:
    return RandomWeights(shapes, seed=seed, std=_std(config), draws_score=True)


def _noise(name: str, shape: torch.Size, size: float, seed: int) -> Tensor:
    digest = hashlib.sha256(f"noise:{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return size * torch.randn(shape, generator=generator)


def _std(config: Mapping[str, Any]) -> float:
    return float(config.get("initializer_range") or 0.02)


def _transformers_model(config: Mapping[str, Any], head: Head) -> torch.nn.Module:
    """Returns the model of a config.json, with the weights that transformers gives it."""
    made = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    kind = AutoModelForImageTextToText if reads_images(config) else HEADS[head]
    return kind.from_config(made, dtype=torch.float32)
