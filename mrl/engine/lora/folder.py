"""Reads and writes adapter folders as peft does, and finds the adapters that a config asks for."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from mrl.config.schema import LoraConfig
from mrl.engine.lora.shapes import AdapterShape, adapter_shapes, first_difference
from mrl.engine.torch_dist.data_files import as_bytes
from mrl.errors import ModelError
from mrl.weights.adapter_folder import BASE, CONFIG, WEIGHTS
from mrl.weights.companions import companion_files
from mrl.weights.json_file import read_json
from mrl.weights.safetensors_io import NAMES, TensorInfo, lay_out

if TYPE_CHECKING:
    from mrl.engine.lora.selection import Injection

_OF_THE_BASE = {"config.json", "generation_config.json", "LICENSE"}
"""Files that an adapter does not copy from its base: with a config.json the folder would look like a model."""


def _injection(model_folder: str, lora: LoraConfig, head: str) -> Injection:
    from mrl.engine.lora.selection import injection  # only a model with adapters waits for peft's slow import

    return injection(model_folder, lora, head)


def adapters(model_folder: str, lora: LoraConfig, head: str) -> dict[str, AdapterShape]:
    """Returns the adapters of the selection `lora` on the model of a Hugging Face folder, by the name of the adapted
    weight.

    head: "lm" or "value". Only config.json is read. Names are Hugging Face's, as `model.layers.0.self_attn.q_proj`.
    Experts in one parameter have the parameter's name, as `model.layers.0.mlp.experts.gate_up_proj`. Raises ConfigError
    if a part of the selection matches nothing, or if it contains the output layer or the embedding.
    """
    return dict(_injection(model_folder, lora, head).shapes)


def shapes_in_file(model_folder: str, lora: LoraConfig, head: str) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor in the adapter file of the selection `lora` on the model of a Hugging Face
    folder."""
    injected = _injection(model_folder, lora, head)
    return adapter_shapes(injected.shapes, head, injected.hidden_size)


def write_adapter(
    path: str | Path,
    lora: LoraConfig,
    base_model_path: str,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    head: str = "lm",
) -> None:
    """Writes a folder that `peft.PeftModel.from_pretrained(base model, path)` loads, with tokenizer and template.

    tensors: those of `BaseEngine.adapter_weights`. base_model_path: the folder of the base model; `name_base` gives it
    another name. An interrupted write leaves no folder that loads.
    """
    expected = shapes_in_file(base_model_path, lora, head)
    held = dict(tensors)
    shapes = {name: tuple(tensor.shape) for name, tensor in held.items()}
    assert shapes == expected, f"adapter tensors {sorted(shapes.items() ^ expected.items())}"
    out = Path(path)
    out.mkdir(parents=True, exist_ok=True)
    (out / CONFIG).unlink(missing_ok=True)
    for source in companion_files(Path(base_model_path)):
        if source.name not in _OF_THE_BASE and source.suffix != ".py":
            target = out / source.relative_to(base_model_path)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    write_adapter_files(path, lora, base_model_path, held, head=head)


def write_adapter_files(
    path: str | Path,
    lora: LoraConfig,
    base_model_path: str,
    tensors: Mapping[str, Tensor],
    *,
    head: str = "lm",
) -> None:
    """Writes the two files of an adapter folder that an inference server reads.

    Modules without a tensor here stay as in the base.
    """
    injected = _injection(base_model_path, lora, head)
    on_host = {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in tensors.items()}
    out = Path(path)
    out.mkdir(parents=True, exist_ok=True)
    (out / CONFIG).unlink(missing_ok=True)
    with (out / f".{WEIGHTS}.part").open("wb") as file:  # safetensors' own writer raises no OSError for a full disk
        file.write(lay_out({name: TensorInfo(NAMES[t.dtype], tuple(t.shape)) for name, t in on_host.items()}).header)
        for tensor in on_host.values():
            file.write(as_bytes(tensor))
    os.replace(out / f".{WEIGHTS}.part", out / WEIGHTS)
    about = {
        key: sorted(value) if isinstance(value, set) else value for key, value in injected.config.to_dict().items()
    } | {BASE: os.path.abspath(base_model_path), "inference_mode": True, "init_lora_weights": True}
    if head == "value":
        about["modules_to_save"] = ["score"]
    (out / f".{CONFIG}.part").write_text(json.dumps(about, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(out / f".{CONFIG}.part", out / CONFIG)


def name_base(path: str | Path, name: str) -> None:
    """Sets the base in the adapter folder `path`, a folder or hub id, for readers that use peft."""
    config = Path(path) / CONFIG
    about = read_json(config)
    about[BASE] = os.path.abspath(name) if os.path.isdir(name) else name
    config.write_text(json.dumps(about, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_adapter(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns (adapter_config.json, tensors by their name in the file) of an adapter folder. Raises ModelError for
    others."""
    folder = Path(path)
    lost = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
    if lost:
        raise ModelError(folder, why=f"has no {lost[0]}", fix="give a folder that mrl or peft wrote")
    try:
        return read_json(folder / CONFIG), load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(folder, why=f"is not a readable adapter ({error})", fix="get it again") from None


def read_fitting(path: str | Path, model_folder: str, lora: LoraConfig, head: str) -> dict[str, Tensor]:
    """Returns the tensors of an adapter folder with the same adapters as the selection `lora` on the model of a folder.

    Raises ModelError if names, shapes or scales differ: B A times another scale is another model.
    """
    from mrl.engine.lora.selection import check_is_plain, shapes_of_folder  # as above

    _, tensors = read_adapter(path)
    check_is_plain(str(path))
    expected = shapes_in_file(model_folder, lora, head)
    difference = first_difference(tensors, expected)
    if difference is not None:
        name, there, here, count = difference
        raise ModelError(
            path,
            why=f"{name} is {there} there and {here} with this config's model.lora ({count} tensors differ)",
            fix="give the adapter's own rank and targets",
        )
    ours = {name: shape.scale for name, shape in adapters(model_folder, lora, head).items()}
    theirs = {name: shape.scale for name, shape in shapes_of_folder(str(path), model_folder)[0].items()}
    differ = [n for n in ours if n not in theirs or not math.isclose(ours[n], theirs[n], rel_tol=1e-6)]
    if differ:
        name = differ[0]
        raise ModelError(
            path,
            why=f"{CONFIG} gives the adapter of {name} the scale {theirs.get(name, 'of none')} "
            f"and this config's model.lora {ours[name]} ({len(differ)} adapters differ)",
            fix="give the adapter's own alpha and rslora",
        )
    return tensors
