"""Reads a Hugging Face config.json, in the spelling of transformers 5 or of older versions, into one plain dict.

Missing keys get the defaults of the installed transformers' config class of that `model_type`. So the model is the one
that transformers would build from the same file.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mrl.errors import ModelError
from mrl.weights.composites import COMPOSITES, text_fields
from mrl.weights.families import family_of
from mrl.weights.json_file import read_json, shorten_value

MAX_THETA = 1e30
"""The largest theta of rotary embeddings: frequencies are computed in fp32, which ends at 3e38."""
_FIX = "correct the field, or get the file again"
_MOST = {"num_hidden_layers": 10_000} | dict.fromkeys(
    ("vocab_size", "decoder_sparse_step", "num_attention_heads", "num_key_value_heads"), 2**31
)
_POSITIVE = ("rms_norm_eps", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
_MAX_WORDS = 250
"""Most characters of a message of transformers, which repeats values however long they are."""
VISION_LANGUAGE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""The `model_type`s that train on rows with images."""
GGUF = "make a Hugging Face folder of it with transformers (docs/convert.md#gguf)"
"""The advice for a GGUF file."""


def reads_images(hf_config: Mapping[str, Any]) -> bool:
    """Returns whether a model is one of VISION_LANGUAGE: the fsdp engine gives it images."""
    return hf_config.get("model_type") in VISION_LANGUAGE


def vocab_size_of(hf_config: Mapping[str, Any]) -> int | None:
    """Returns the rows of the embedding. A model that reads more than text has them in its text part."""
    return hf_config.get("vocab_size", (hf_config.get("text_config") or {}).get("vocab_size"))


def pad_token_of(hf_config: dict[str, Any]) -> int | None:
    """Returns `pad_token_id` of the part that reads text, as transformers does; None if it has none."""
    return (hf_config.get("text_config") or hf_config).get("pad_token_id")


def positions_of(hf_config: Mapping[str, Any]) -> int | None:
    """Returns the positions that a model is made for; None if its config.json states none.

    A rotary embedding that is stretched by a factor has so many times its original ones, as transformers' YaRN.
    """
    text = hf_config.get("text_config")
    for fields in (text if isinstance(text, Mapping) else {}, hf_config):
        for name in ("max_position_embeddings", "n_positions"):
            stated = fields.get(name)
            if type(stated) is not int or stated < 1:
                continue
            positions = [stated]
            for rope in (fields.get("rope_parameters"), fields.get("rope_scaling")):
                rope = rope if isinstance(rope, Mapping) else {}
                factor, original = rope.get("factor", 1), rope.get("original_max_position_embeddings")
                if type(factor) in (int, float) and type(original) is int:
                    positions.append(int(factor * original))
            return max(positions)
    return None


def read_hf_config(path: str | Path) -> dict[str, Any]:
    """Returns the config of the model folder `path`, with both spellings resolved; see `normalize`."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ModelError(file, why="no such file", fix="a Hugging Face model folder has a config.json")
    return normalize(read_json(file), where=str(file))


def normalize(raw: Mapping[str, Any], where: str = "config.json") -> dict[str, Any]:
    """Returns `raw` completed with transformers' defaults, and with one meaning for each of these keys:

        rope_theta             float
        rope_scaling           dict with `rope_type`, or None for plain RoPE
        head_dim               int
        num_key_value_heads    int
        num_experts            int (0 for none)
        dtype                  name such as "bfloat16", or None
        tie_word_embeddings    bool

    A composite (mrl.weights.composites) gives the fields of its text part, under its own `model_type`.

    A `model_type` that transformers does not know is returned as it is: `family_for` refuses it by name. transformers
    refuses fields of another type. Of the families with a table, a few numbers that it takes are refused here.
    """
    if not isinstance(raw.get("model_type"), str):
        raise ModelError(
            where,
            why=f"model_type {shorten_value(raw.get('model_type'))} is not a name",
            fix="it says which family this is",
        )
    if raw["model_type"] in COMPOSITES and not isinstance(raw.get("text_config"), dict):
        # transformers would make up a whole model
        raise ModelError(where, why="has no text_config", fix="get the model's config.json again")
    known = family_of(raw["model_type"]) is not None
    if known:
        _check_ranges(raw, where)
    config = _of_transformers(raw, where)
    if config is None:
        return dict(raw)
    rope = dict(config.get("rope_parameters") or {})
    theta = rope.pop("rope_theta", None)
    if theta is not None and not (type(theta) in (int, float) and 1 < theta < MAX_THETA):
        raise ModelError(
            where,
            why=f"rope_theta {shorten_value(theta)} is not above 1 and below {MAX_THETA:g}",
            fix=_FIX,
        )
    config["rope_theta"] = float(theta) if theta is not None else None
    config["rope_scaling"] = rope if rope.get("rope_type", "default") != "default" else None
    heads = config.get("num_attention_heads")
    if heads and config.get("hidden_size"):  # of families without a table, some say it otherwise
        config["num_key_value_heads"] = config.get("num_key_value_heads") or heads
        config["head_dim"] = config.get("head_dim") or config["hidden_size"] // heads
    experts = (config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    config["num_experts"] = next(filter(None, experts), 0)
    dtype = config.get("dtype") or config.get("torch_dtype")
    config["dtype"] = str(dtype).removeprefix("torch.") if dtype else None
    config["tie_word_embeddings"] = bool(config.get("tie_word_embeddings"))
    if known:
        _check_relations(config, rope, where)
    return config


def _check_ranges(fields: Mapping[str, Any], where: str) -> None:
    """Refuses numbers with which transformers does not return, or fails far from the field. null means a default."""
    for name, value in fields.items():
        if name in ("text_config", "rope_parameters", "rope_scaling") and isinstance(value, Mapping):
            _check_ranges(value, where)
            continue
        if value is None:
            continue
        if name in _MOST and not (type(value) is int and 0 < value <= _MOST[name]):
            why = f"{name} {shorten_value(value)} is no whole number from 1 to {_MOST[name]}"
            raise ModelError(where, why=why, fix=_FIX)
        if name in _POSITIVE and not (type(value) in (int, float) and 0 < value < MAX_THETA):
            why = f"{name} {shorten_value(value)} is no number above 0 and below {MAX_THETA:g}"
            raise ModelError(where, why=why, fix=_FIX)


def _check_relations(config: Mapping[str, Any], rope: Mapping[str, Any], where: str) -> None:
    """Refuses fields that do not fit each other. config: complete."""
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    experts, chosen = config["num_experts"], config.get("num_experts_per_tok")
    low, high = rope.get("low_freq_factor"), rope.get("high_freq_factor")
    why = None
    if heads % groups:
        why = f"num_key_value_heads {groups} does not divide num_attention_heads {heads}"
    elif experts and chosen is not None and not 0 < chosen <= experts:
        why = f"num_experts_per_tok {chosen} is not 1 to {experts}, the number of experts"
    elif low is not None and high is not None and low >= high:
        why = f"low_freq_factor {low} is not below high_freq_factor {high}"
    if why is not None:
        raise ModelError(where, why=why, fix=_FIX)


def changes_to_text(path: str | Path) -> dict[str, Any]:
    """Returns changes of the config.json in `path` that make it that of its text part, as the class of causal language
    models takes it."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    whole = AutoConfig.from_pretrained(path, trust_remote_code=False).to_dict()
    text = whole["text_config"]
    return dict.fromkeys(whole) | text | {"architectures": [CLASSES[whole["model_type"]]]}


def _of_transformers(raw: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """Returns transformers' own version of it; None if it does not know the model_type."""
    from transformers import CONFIG_MAPPING  # slow to import: the tables need none

    if raw["model_type"] not in CONFIG_MAPPING:
        return None
    try:
        config = CONFIG_MAPPING[raw["model_type"]].from_dict(copy.deepcopy(raw))  # it edits its argument
        return text_fields(config) if raw["model_type"] in COMPOSITES else config.to_dict()
    except Exception as error:  # transformers has no common class for what a config can have wrong
        raise ModelError(where, why=f"transformers refuses it: {str(error)[:_MAX_WORDS]}", fix=_FIX) from None
