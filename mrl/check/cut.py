"""Makes a model's config.json with fewer layers, a smaller width or fewer experts, and the same shape otherwise."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from mrl.errors import ModelError, UserError, quoted

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


def parse(text: str) -> ModelCut | None:
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
