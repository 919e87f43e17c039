"""Describes the text model of Qwen3.5: gated delta nets (arXiv 2412.06464), and attention with a gate on its output in
some layers. All norms but one have the factor 1 + weight."""

import dataclasses
from typing import Any

from mrl.errors import ModelError
from mrl.weights.fields import DENSE, dense_fields, require, rotary_percent
from mrl.weights.json_file import shorten_value
from mrl.weights.table import ATTENTION, DENSE_MLP, OWN_MTP, QK_NORM, Entry, Family, HFConfig, delta_net, delta_sizes

LINEAR = frozenset("""
    layer_types partial_rotary_factor linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads
    linear_num_value_heads linear_value_head_dim full_attention_interval mamba_ssm_dtype attn_output_gate
    mtp_num_hidden_layers mtp_use_dedicated_embeddings
""".split())  # fmt: skip  # noqa: SIM905
"""Fields that `linear_fields` reads."""


def with_gate(entry: Entry) -> Entry:
    """Returns the entry of queries with a gate behind each; others as they are."""
    hf = tuple((name, ("two_q", "hidden") if shape == ("q", "hidden") else shape) for name, shape in entry.hf)
    return dataclasses.replace(entry, hf=hf) if entry.kind == "qkv" else entry


def is_linear(config: HFConfig, layer: int) -> bool:
    types = config["layer_types"]
    return layer < len(types) and types[layer] == "linear_attention"


def linear_fields(hf: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of layers with gated delta nets among others, and of what both have."""
    unknown = sorted(set(hf["layer_types"]) - {"full_attention", "linear_attention"})
    if unknown:
        why = "layer_types must name full_attention or linear_attention for each layer"
        raise ModelError("config.json", why=why, fix=f"got {shorten_value(unknown)}; use engine.backend=fsdp")
    require(hf, "attn_output_gate", (True, None))
    require(hf, "mamba_ssm_dtype", ("float32", None))
    require(hf, "mtp_num_hidden_layers", (0, 1, None))
    require(hf, "mtp_use_dedicated_embeddings", (False, None))
    return {
        "linear_attention_freq": [int(is_linear(hf, layer)) for layer in range(hf["num_hidden_layers"])],
        "linear_conv_kernel_dim": hf["linear_conv_kernel_dim"],
        "linear_key_head_dim": hf["linear_key_head_dim"],
        "linear_num_key_heads": hf["linear_num_key_heads"],
        "linear_num_value_heads": hf["linear_num_value_heads"],
        "linear_value_head_dim": hf["linear_value_head_dim"],
        "rotary_percent": rotary_percent(hf),
        "attention_output_gate": True,
        "layernorm_zero_centered_gamma": True,
    }


def fields(hf: dict[str, Any]) -> dict[str, Any]:
    return dense_fields(hf, qk_norm=True, partial_rotary=True, mrope=True) | linear_fields(hf)


FAMILY = Family(
    model_type="qwen3_5_text",
    layer=tuple(map(with_gate, ATTENTION)) + QK_NORM,
    linear=delta_net("linear_attn"),
    is_linear=is_linear,
    dense=DENSE_MLP,
    sizes=delta_sizes,
    mtp=OWN_MTP,
    mtp_block="mtp.layers.0.",
    reads=DENSE | LINEAR,
    carries=("mtp.",),  # layers that predict further tokens, of which transformers has no model
    fields=fields,
)
