"""A config.json that says by itself what its model is, completed as transformers would, whose import takes two seconds.

For dense families, whose files are small enough that two seconds count. Whatever is not plain (a field that is left out
or of another type, another kind of RoPE) is for transformers to complete or to refuse: `completed` gives None.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

_REQUIRED = {
    "vocab_size": int, "hidden_size": int, "intermediate_size": int, "num_hidden_layers": int,
    "num_attention_heads": int,
    "rms_norm_eps": float, "hidden_act": str, "max_position_embeddings": int,
}  # fmt: skip
_DEFAULTS = {"attention_dropout": 0.0, "tie_word_embeddings": False}
_WINDOW = {"use_sliding_window": bool, "max_window_layers": int}
# what each family says beyond _REQUIRED, and what it may leave out beyond _DEFAULTS
_FAMILIES: dict[str, tuple[dict[str, type], dict[str, Any]]] = {
    "llama": ({}, {"attention_bias": False, "mlp_bias": False, "num_key_value_heads": None, "head_dim": None}),
    "mistral": ({"num_key_value_heads": int, "head_dim": int}, {}),
    "qwen2": (_WINDOW | {"num_key_value_heads": int}, {}),
    "qwen3": (_WINDOW | {"num_key_value_heads": int, "head_dim": int}, {"attention_bias": False}),
}
_OPTIONAL = {"num_key_value_heads": int, "head_dim": int}
_BESIDE = {
    "bos_token_id": (int, type(None)), "eos_token_id": (int, type(None), list), "pad_token_id": (int, type(None)),
    "pretraining_tp": (int,), "use_cache": (bool,), "initializer_range": (float,),
}  # fmt: skip
"""What transformers takes for fields that change no maths: it loads no folder whose config.json has another."""
_LLAMA3 = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
_ROPE = {"rope_theta", "rope_type", "type"}
_DTYPES = (None, "float32", "bfloat16", "float16")
_LAYERS = {"full_attention", "sliding_attention"}


def completed(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns `raw` with the fields that it leaves out, as transformers 5 spells them; None where it is not plain."""
    if raw["model_type"] not in _FAMILIES:
        return None
    required, defaults = _FAMILIES[raw["model_type"]]
    config = {**_DEFAULTS, **defaults, **copy.deepcopy(raw)}
    types = (
        {name: type(value) for name, value in (_DEFAULTS | defaults).items() if value is not None}
        | _REQUIRED
        | required
    )
    plain = all(type(config.get(name)) is kind for name, kind in types.items())
    plain &= all(config.get(name) is None or type(config[name]) is kind for name, kind in _OPTIONAL.items())
    plain &= all(type(config[name]) in kinds for name, kinds in _BESIDE.items() if name in config)
    eos = config.get("eos_token_id")
    plain &= not isinstance(eos, list) or all(type(token) is int for token in eos)
    plain &= all(config.get(name) in _DTYPES for name in ("dtype", "torch_dtype"))
    plain &= not {"partial_rotary_factor", "original_max_position_embeddings"} & config.keys()
    if not plain or config["num_attention_heads"] < 1 or config["hidden_size"] % config["num_attention_heads"]:
        return None
    rope, windows = _rope(config), _windows(config)
    if rope is None or windows is None:
        return None
    settled = windows | {"rope_parameters": rope, "dtype": config.get("dtype") or config.get("torch_dtype")}
    old = ("rope_theta", "rope_scaling", "torch_dtype")
    return {name: value for name, value in config.items() if name not in old} | settled


def _rope(config: dict[str, Any]) -> dict[str, Any] | None:
    found = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(found, dict):
        return None
    rope = dict(found)
    rope.setdefault("rope_theta", config.get("rope_theta"))
    rope.setdefault("rope_type", rope.get("type", "default"))
    numbers = [value for name, value in rope.items() if name not in ("rope_type", "type")]
    wanted = {"default": _ROPE, "llama3": _ROPE | _LLAMA3}.get(rope["rope_type"])
    if wanted is None or not rope.keys() <= wanted or any(type(n) not in (int, float) for n in numbers):
        return None
    return rope if rope["rope_type"] == "default" or rope.keys() >= _LLAMA3 else None


def _windows(config: dict[str, Any]) -> dict[str, Any] | None:
    """Fields about sliding windows, as transformers settles them when it reads a config."""
    family, layers = config["model_type"], config["num_hidden_layers"]
    if family == "llama":
        return {}
    if "sliding_window" not in config or type(config["sliding_window"]) not in (int, type(None)):
        return None
    if family == "mistral":
        return {}
    window = config["sliding_window"] if config["use_sliding_window"] else None
    types = config.get("layer_types")
    if types is None:
        slides = [window is not None and layer >= config["max_window_layers"] for layer in range(layers)]
        types = ["sliding_attention" if slide else "full_attention" for slide in slides]
    if not isinstance(types, list) or len(types) != layers or not all(t in _LAYERS for t in types):
        return None
    return {"sliding_window": window, "layer_types": types}
