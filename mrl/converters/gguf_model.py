"""What a GGUF file's metadata and names mean: its config.json, and which tensor is which of Hugging Face's.

A key of the architecture that is not known, and not off, may change the maths: it is refused by its name. Keys and
names: github.com/ggml-org/llama.cpp, gguf-py/gguf/constants.py and convert_hf_to_gguf.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mrl.converters.families import FAMILIES
from mrl.converters.fields import harmless
from mrl.converters.gguf_file import GGUFFile, Place
from mrl.converters.rules import expected_hf_names
from mrl.converters.table import HFConfig
from mrl.errors import ModelError

ARCHITECTURES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe",
}  # fmt: skip
"""ggml's architecture -> model_type. Mistral is a llama there, and so is Mixtral, which has experts."""

_FIELDS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_READ = frozenset([
    *_FIELDS, "attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count",
    "rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.finetuned", "expert_count", "expert_used_count", "expert_feed_forward_length",
    "expert_shared_feed_forward_length", "expert_shared_count", "expert_gating_func", "expert_weights_norm",
    "vocab_size",
    "tensor_data_layout", "attention.causal",
])  # fmt: skip
_TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}
ROPE_FREQS = "rope_freqs.weight"
_SOFTMAX = 1
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of every published Llama 3: a file has only the factors that follow from them."""

_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_OF_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}  # fmt: skip
_OF_EXPERT = {
    "gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps", "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps", "w2": "ffn_down_exps",
}  # fmt: skip
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")


def config_of(file: GGUFFile) -> dict[str, Any]:
    """Returns the fields of config.json that `file` gives; ModelError names a key that is missing or not supported."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            file.path,
            why=f"general.architecture {architecture!r} is not supported",
            fix=f"supported are {', '.join(ARCHITECTURES)}",
        )
    given = {
        k.removeprefix(f"{architecture}."): v for k, v in file.metadata.items() if k.startswith(f"{architecture}.")
    }
    for key, value in given.items():
        if key not in _READ and not harmless(value):
            raise _unsupported(file, key, value, "it may change the maths, and is not known here")
    for key in _FIELDS:
        _number(file, given, key, float if key.endswith("epsilon") else int)
    if given["block_count"] > len(file.tensors):
        raise _unsupported(file, "block_count", given["block_count"], f"the file has {len(file.tensors)} tensors")
    model_type = ARCHITECTURES[architecture]
    if model_type == "llama" and given.get("expert_count"):
        model_type = "mixtral"
    hf = {name: _decimal(given[key]) for key, name in _FIELDS.items()} | {"model_type": model_type}
    hf |= _heads(file, given, hf) | _rope(file, given, hf) | _experts(file, given, model_type)
    hf["vocab_size"] = _shape(file, "token_embd.weight")[0]
    hf["tie_word_embeddings"] = "output.weight" not in file.tensors
    tokens = {name: file.metadata.get(f"tokenizer.ggml.{key}") for key, name in _TOKENS.items()}
    return hf | tokens


def _unsupported(file: GGUFFile, key: str, value: Any, why: str) -> ModelError:
    return ModelError(
        file.path, why=f"{file.metadata['general.architecture']}.{key} = {value!r} is not supported: {why}"
    )


def _number(file: GGUFFile, given: Mapping[str, Any], key: str, kind: type[int] | type[float] = int) -> Any:
    value = given.get(key)
    if not (isinstance(value, kind) and value > 0):
        raise ModelError(
            file.path,
            why=f"{file.metadata['general.architecture']}.{key} is {value!r} and not one number above 0",
            fix="get another file",
        )
    return value


def _shape(file: GGUFFile, name: str) -> tuple[int, ...]:
    if name not in file.tensors:
        raise ModelError(file.path, why=f"has no tensor {name}", fix="get the whole file")
    return file.tensors[name].shape


def _decimal(value: float) -> float:
    """Returns a single-precision number as a person wrote it: 1e-05, not 9.999999747378752e-06."""
    return value if isinstance(value, int) else float(f"{value:.7g}")


def _heads(file: GGUFFile, given: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
    heads = hf["num_attention_heads"]
    groups = given.get("attention.head_count_kv", heads)
    if not isinstance(groups, int):
        raise _unsupported(file, "attention.head_count_kv", groups, "layers differ")
    even = hf["hidden_size"] // heads
    size = given.get("attention.key_length", even)
    turning = given.get("rope.dimension_count", size)
    for key, value in (
        ("attention.value_length", given.get("attention.value_length", size)),
        ("rope.dimension_count", turning),
    ):
        if value != size:
            raise _unsupported(file, key, value, f"heads have {size}")
    if size != even and hf["model_type"] in ("qwen2", "qwen2_moe"):
        raise _unsupported(file, "attention.key_length", size, f"{hf['model_type']} has heads of {even}")
    if not given.get("attention.causal", True):
        raise _unsupported(file, "attention.causal", False, "the model is no decoder")
    layout = given.get("tensor_data_layout")
    if layout not in (None, "Meta AI original pth"):
        raise _unsupported(file, "tensor_data_layout", layout, "rows are in an order that is not known here")
    own = {} if hf["model_type"] in ("qwen2", "qwen2_moe") else {"head_dim": size}
    return {"num_key_value_heads": groups} | own


def _rope(file: GGUFFile, given: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
    for key in ("rope.freq_base", "rope.scaling.factor"):
        if key in given and type(given[key]) not in (int, float):
            raise _unsupported(file, key, given[key], "it is no number")
    theta = _decimal(given.get("rope.freq_base", 10000.0))
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind = given.get("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise _unsupported(file, "rope.scaling.type", kind, "supported are none and linear")
    if kind == "linear":
        parameters |= {"rope_type": "linear", "factor": _decimal(given.get("rope.scaling.factor", 1.0))}
    if ROPE_FREQS in file.tensors:
        size = given.get("attention.key_length", hf["hidden_size"] // hf["num_attention_heads"])
        if kind == "linear" or file.tensors[ROPE_FREQS].shape != (size // 2,):
            raise _unsupported(
                file, "rope.scaling.type", kind, f"{ROPE_FREQS} is {list(file.tensors[ROPE_FREQS].shape)}"
            )
        parameters |= _llama3(file, theta)
    return {"rope_parameters": parameters}


def _llama3(file: GGUFFile, theta: float) -> dict[str, Any]:
    """Llama 3's scaling: the file divides each frequency by a factor of `rope_freqs.weight`."""
    stored = file.tensors[ROPE_FREQS]
    if stored.type != "F32":
        raise ModelError(file.path, why=f"{ROPE_FREQS} is {stored.type}, not F32", fix="get another file")
    with file.path.open("rb") as stream:
        stream.seek(stored.start)
        factors = torch.frombuffer(bytearray(stream.read(stored.row_bytes)), dtype=torch.float32)
    scaling = {"rope_type": "llama3", "factor": float(factors.max()), **_LLAMA3}
    if (factors == 1).all():
        return {}
    if not torch.allclose(factors, llama3_factors(len(factors), theta, scaling), rtol=1e-4):
        raise ModelError(
            file.path,
            why=f"{ROPE_FREQS} holds factors that do not follow from Llama 3's scaling ({_LLAMA3})",
            fix="convert the Hugging Face folder that it was made from",
        )
    return scaling


def llama3_factors(count: int, theta: float, scaling: Mapping[str, Any]) -> Tensor:
    """Returns [count] fp32: what llama.cpp divides each frequency by, for a `rope_scaling` of type llama3."""
    wavelengths = 2 * math.pi * theta ** (torch.arange(count, dtype=torch.float32) / count)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / wavelengths
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - smooth) / scaling["factor"] + smooth)


def _experts(file: GGUFFile, given: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    count = given.get("expert_count", 0)
    if not FAMILIES[model_type].sparse:
        if count:
            raise _unsupported(file, "expert_count", count, f"{model_type} has none")
        return {}
    gating = given.get("expert_gating_func", _SOFTMAX)
    if gating not in (0, _SOFTMAX):
        raise _unsupported(file, "expert_gating_func", gating, "supported is softmax (1)")
    normalised = model_type != "qwen2_moe"  # as llama.cpp computes these
    if given.get("expert_weights_norm", normalised) != normalised:
        raise _unsupported(file, "expert_weights_norm", not normalised, f"of {model_type} it is {normalised}")
    count, stacked = _number(file, given, "expert_count"), _shape(file, "blk.0.ffn_gate_exps.weight")
    if len(stacked) != 3 or count > stacked[0]:
        raise _unsupported(file, "expert_count", count, f"blk.0.ffn_gate_exps.weight is {list(stacked)}")
    hf = {
        "num_experts_per_tok": _number(file, given, "expert_used_count"),
        "num_local_experts" if model_type == "mixtral" else "num_experts": count,
    }
    if model_type == "mixtral":
        return hf
    hf |= {"moe_intermediate_size": stacked[1], "norm_topk_prob": normalised}
    if model_type == "qwen2_moe":
        hf["shared_expert_intermediate_size"] = _shape(file, "blk.0.ffn_gate_shexp.weight")[0]
    return hf


def places_of(file: GGUFFile, hf_config: HFConfig) -> tuple[dict[str, Place], list[str]]:
    """Returns (where each Hugging Face tensor of the model lies that the file has, its other tensors)."""
    family = FAMILIES[hf_config["model_type"]]
    places, used = {}, {ROPE_FREQS} if file.metadata["general.architecture"] == "llama" else set()
    for name, shape in expected_hf_names(family, hf_config).items():
        stored, expert = stored_name(name)
        if stored in file.tensors:
            used.add(stored)
            found = file.tensors[stored].shape
            if expert is not None and len(found) == 3 and found[0] == hf_config["num_experts"]:
                found = found[1:]
            if shape[0] == 1 and len(found) == len(shape) - 1:  # the gate of a shared expert is a row
                found = (1, *found)
            places[name] = Place(stored, found, expert or 0, _permuted_heads(file, name, hf_config))
    return places, [name for name in file.tensors if name not in used]


def _permuted_heads(file: GGUFFile, name: str, hf_config: HFConfig) -> int | None:
    if file.metadata["general.architecture"] != "llama" or not name.endswith(("q_proj.weight", "k_proj.weight")):
        return None
    return hf_config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]


def stored_name(name: str) -> tuple[str, int | None]:
    """Returns (name in a GGUF file, number of the expert in it) of a Hugging Face tensor."""
    module, _, kind = name.rpartition(".")
    if module in _WHOLE:
        return f"{_WHOLE[module]}.{kind}", None
    found = _LAYER.fullmatch(name)
    assert found is not None, f"{name} is of no layer"
    layer, inside, kind = found.groups()
    if expert := _EXPERT.fullmatch(inside):
        return f"blk.{layer}.{_OF_EXPERT[expert[2]]}.{kind}", int(expert[1])
    return f"blk.{layer}.{_OF_LAYER[inside]}.{kind}", None
