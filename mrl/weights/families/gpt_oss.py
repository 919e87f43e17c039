"""Describes GPT-OSS: attention sinks, every other layer with a window, biases everywhere, stacked experts that clamp.

The file interleaves gate and up of an expert, column by column, and holds matrices as [expert, in, out].
"""

import functools
from typing import Any

import torch

from mrl.weights.fields import DENSE, EXPERTS, dense_fields, moe_fields, require, window_fields
from mrl.weights.table import (
    ATTENTION,
    Family,
    Stack,
    every_layer,
    in_layer,
    mlp_norm,
    of_experts,
    proj_bias,
    qkv_bias,
)

_EXPERTS = "model.layers.{l}.mlp.experts."
_GATE, _UP, _DOWN = (_EXPERTS + "{e}." + name for name in ("gate_proj", "up_proj", "down_proj"))


def scaled_silu(x: torch.Tensor, alpha: float) -> torch.Tensor:
    """Returns x sigmoid(alpha x)."""
    return x * torch.sigmoid(alpha * x)


def fields(hf: dict[str, Any]) -> dict[str, Any]:
    require(hf, "attention_bias", (True,))
    require(hf, "attention_dropout", (0, 0.0, None))
    require(hf, "experts_per_token", (None, hf["num_experts_per_tok"]))
    if hf["rope_scaling"] is not None:
        require(hf["rope_scaling"], "attention_factor", (None,))
    moe = moe_fields(hf, every_layer, ffn="intermediate_size", normalise=True)
    return dense_fields(hf, qkv_bias=True, yarn=True) | window_fields(hf, hf["layer_types"]) | moe | {
        "add_bias_linear": True,
        "softmax_type": "learnable",
        "activation_func": functools.partial(scaled_silu, alpha=hf.get("swiglu_alpha", 1.702)),
        "activation_func_clamp_value": hf.get("swiglu_limit", 7.0),
        "glu_linear_offset": 1.0,
        "bias_activation_fusion": False,  # megatron's fused function clamps before it adds the bias
    }  # fmt: skip


SINKS = in_layer("self_attention.core_attention.softmax_offset", "column", {"self_attn.sinks": "heads"})
_EXPERT = "mlp.experts.{e}."
_BOTH = (_EXPERT + "gate_proj", _EXPERT + "up_proj")
SPARSE = (
    *mlp_norm(sparse=True),
    in_layer("mlp.router.weight", "replicated", {"mlp.router.weight": "experts hidden"}),
    in_layer("mlp.router.bias", "replicated", {"mlp.router.bias": "experts"}),
    of_experts("linear_fc1", "weight", "gate_up", {f"{name}.weight": "moe_ffn hidden" for name in _BOTH}),
    of_experts("linear_fc1", "bias", "gate_up", {f"{name}.bias": "moe_ffn" for name in _BOTH}),
    of_experts("linear_fc2", "weight", "row", {_EXPERT + "down_proj.weight": "hidden moe_ffn"}),
    of_experts("linear_fc2", "bias", "replicated", {_EXPERT + "down_proj.bias": "hidden"}),
)
STACKS = (
    Stack(_EXPERTS + "gate_up_proj", (_GATE + ".weight", _UP + ".weight"), transposed=True),
    Stack(_EXPERTS + "gate_up_proj_bias", (_GATE + ".bias", _UP + ".bias")),
    Stack(_EXPERTS + "down_proj", (_DOWN + ".weight",), transposed=True),
    Stack(_EXPERTS + "down_proj_bias", (_DOWN + ".bias",)),
)

FAMILY = Family(
    model_type="gpt_oss",
    layer=(*ATTENTION, *qkv_bias(), *proj_bias(), SINKS),
    sparse=SPARSE,
    is_sparse=every_layer,
    stacks=STACKS,
    reads=DENSE | EXPERTS | {
        "sliding_window", "layer_types", "swiglu_alpha", "swiglu_limit", "experts_per_token",
        "initial_context_length",  # what rope_scaling calls original_max_position_embeddings
    },
    fields=fields,
)  # fmt: skip
