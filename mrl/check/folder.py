"""Makes the model folder of a check. Dropout is 0 in it.

It is the user's own, by links where transformers can read it as it is, or a cut of it with random weights. A cut has
fewer layers, a smaller width or fewer experts, and the same shape otherwise.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from mrl.check.reference import HEADS
from mrl.engine.stored_weights import open_imported
from mrl.errors import ModelError, UserError, quoted
from mrl.weights.accounting import SCORE
from mrl.weights.companions import companion_files
from mrl.weights.composites import COMPOSITES
from mrl.weights.families import family_for, family_of
from mrl.weights.hf_config import normalize, reads_images
from mrl.weights.json_file import read_json
from mrl.weights.mcore_weights import is_imported
from mrl.weights.random_weights import RandomWeights
from mrl.weights.rules import expected_hf_names, value_head_config
from mrl.weights.safetensors_io import INDEX, HFWriter, SafetensorsReader, TensorInfo, WeightReader, tensor_infos

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
                parameter.copy_(_with_noise(name, parameter, noise, seed))
        kept = Path(out, "config.json").read_bytes()
        model.save_pretrained(out)
        Path(out, "config.json").write_bytes(kept)
        return False
    shapes = expected_hf_names(family, config, head=head)
    random = _random(shapes, config, seed)
    with HFWriter(out, tensor_infos(shapes, torch.float32)) as writer:
        for name in shapes:
            writer.add(name, _with_noise(name, random(name), noise, seed))
    # of a composite an engine makes the text part alone; it starts a value head from zeros
    return config["model_type"] not in COMPOSITES and head == "lm"


def _random(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], seed: int) -> RandomWeights:
    return RandomWeights(shapes, seed=seed, std=float(config.get("initializer_range") or 0.02), draws_score=True)


def _with_noise(name: str, tensor: Tensor, size: float, seed: int) -> Tensor:
    """Returns a norm or bias with noise of `size`, and any other tensor as it is."""
    if not size or (tensor.ndim >= 2 and not name.endswith("bias")):
        return tensor
    digest = hashlib.sha256(f"noise:{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return tensor + size * torch.randn(tensor.shape, generator=generator)


def _transformers_model(config: Mapping[str, Any], head: Head) -> torch.nn.Module:
    """Returns the model of a config.json, with the weights that transformers gives it."""
    made = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    kind = AutoModelForImageTextToText if reads_images(config) else HEADS[head]
    return kind.from_config(made, dtype=torch.float32)


# -- the cut -----------------------------------------------------------------------------------------------------------

LAYERS, WIDTH = 4, 256
"""The sizes of `auto`: first the layers are cut, and if that does not fit, the width too."""
_SMALLEST_HEAD = 8
_FFN = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_RECURRENT = ("linear_key_head_dim", "linear_value_head_dim")
_MTP = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclasses.dataclass(frozen=True)
class ModelCut:
    """Holds the sizes that a model is cut to. None leaves it whole."""

    layers: int | None = None
    width: int | None = None
    experts: int | None = None

    def __str__(self) -> str:
        parts = ((name, getattr(self, name)) for name in ("layers", "width", "experts"))
        return ", ".join(f"{name} {value}" for name, value in parts if value is not None)

    def __bool__(self) -> bool:
        return bool(str(self))


def parse_cut(text: str) -> ModelCut | None:
    """Returns the cut for a value of `--cut`; None for auto. Raises UserError."""
    if text == "auto":
        return None
    if text == "none":
        return ModelCut()
    sizes: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(layers|width|experts)=([1-9]\d{0,6})\s*", part)
        if match is None or match[1] in sizes:
            fix = "write layers=N, width=N, experts=N, or some of them with commas; or auto, or none"
            raise UserError("--cut", quoted(text), "is no cut", fix)
        sizes[match[1]] = int(match[2])
    return ModelCut(**sizes)


def cut_config(raw: Mapping[str, Any], cut: ModelCut) -> dict[str, Any]:
    """Returns a config.json with fewer layers, a smaller width, fewer experts. raw: the content of its file.

    The number of heads stays, so a layout splits them like those of the whole model; they get smaller. Raises
    ModelError if the file does not name its sizes as most do.
    """
    if not cut:
        return dict(raw)
    made = copy.deepcopy(dict(raw))
    for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"):
        if type(made.get(name)) is not int:
            why = f"has no {name}, so that mrl check does not know how to cut a {made.get('model_type')!r} model"
            raise ModelError("config.json", why=why, fix="give --cut none")
    for name in ("quantization_config", "auto_map", *_MTP):
        made.pop(name, None)
    if cut.layers is not None:
        _cut_layers(made, cut.layers)
    if cut.width is not None and cut.width < made["hidden_size"]:
        _cut_width(made, cut.width)
    if cut.experts is not None:
        _cut_experts(made, cut.experts)
    return made


def without_dropout(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of a config.json with every dropout at 0: two layouts draw other noise."""
    return {name: _undropped(name, value) for name, value in raw.items()}


def _undropped(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_dropout(value)
    is_dropout = ("dropout" in name or name.endswith("_pdrop")) and type(value) in (int, float)
    return 0.0 if is_dropout else value


def _cut_layers(made: dict[str, Any], layers: int) -> None:
    """Keeps the first layers. If another kind begins later, one such layer replaces the last of them."""
    before = made["num_hidden_layers"]
    layers = min(layers, before)
    for name, value in made.items():
        if isinstance(value, list) and len(value) == before:
            kept = value[:layers]
            for kind in [kind for kind in value if kind not in kept][:1]:
                kept[-1] = kind
            made[name] = kept
    made["num_hidden_layers"] = layers
    if made.get("first_k_dense_replace"):
        made["first_k_dense_replace"] = min(made["first_k_dense_replace"], max(1, layers // 2))
    if made.get("mlp_only_layers"):
        made["mlp_only_layers"] = [layer for layer in made["mlp_only_layers"] if layer < layers]
    if made.get("decoder_sparse_step"):
        made["decoder_sparse_step"] = min(made["decoder_sparse_step"], layers)
    if made.get("max_window_layers"):
        whole = made["max_window_layers"] >= before
        made["max_window_layers"] = layers if whole else min(made["max_window_layers"], max(1, layers // 2))


def _cut_width(made: dict[str, Any], width: int) -> None:
    part = width / made["hidden_size"]
    head = made.get("head_dim") or made["hidden_size"] // made["num_attention_heads"]
    made["hidden_size"] = width
    for name in _FFN:
        if made.get(name):
            made[name] = max(32, _multiple(made[name] * part, 8))
    for name in (*_LATENT, *_RECURRENT):
        if made.get(name):
            made[name] = max(_SMALLEST_HEAD, _multiple(made[name] * part, 8))
    if made.get("kv_lora_rank"):  # of latent attention heads have two parts
        heads = {
            "head_dim": made["qk_rope_head_dim"],
            "qk_head_dim": made["qk_nope_head_dim"] + made["qk_rope_head_dim"],
        }
        made.update({name: value for name, value in heads.items() if made.get(name)})
        return
    made["head_dim"] = max(_SMALLEST_HEAD, _multiple(head * part, 4))


def _cut_experts(made: dict[str, Any], experts: int) -> None:
    named = [name for name in _EXPERTS if made.get(name)]
    if not named:
        raise UserError("--cut", why="asks for fewer experts, and the model has none", fix="leave experts out")
    for name in named:
        made[name] = min(experts, made[name])
    groups = made.get("n_group") or 1
    if groups > 1:  # groups of two experts or more, of which the same part is chosen
        kept = math.gcd(groups, max(1, made[named[0]] // 2))
        made["topk_group"] = max(1, made.get("topk_group", 1) * kept // groups)
        made["n_group"] = kept
    if made.get("num_experts_per_tok"):
        made["num_experts_per_tok"] = min(made["num_experts_per_tok"], made[named[0]])


def _multiple(value: float, of: int) -> int:
    """Returns the multiple that is nearest to a size, not 0."""
    return max(of, round(value / of) * of)
