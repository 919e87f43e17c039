"""Describes GPT-OSS: attention sinks, every other layer with a window, biases everywhere, stacked experts that clamp.

The file interleaves gate and up of an expert, column by column, and holds matrices as [expert, in, out].
"""

import functools
from typing import Any

import torch

from mrl.converters.fields import DENSE, EXPERTS, dense_fields, moe_fields, require, window_fields
from mrl.converters.table import ATTENTION, Entry, Family, Stack, every_layer, mlp_norm, proj_bias, qkv_bias

_MCORE, _HF = "decoder.layers.{l}.", "model.layers.{l}."
_LOCAL, _EXPERTS = _MCORE + "mlp.experts.local_experts.{e}.", _HF + "mlp.experts."
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


SINKS = Entry(
    _MCORE + "self_attention.core_attention.softmax_offset", ((_HF + "self_attn.sinks", ("heads",)),), "column"
)
SPARSE = (
    *mlp_norm(sparse=True),
    Entry(_MCORE + "mlp.router.weight", ((_HF + "mlp.router.weight", ("experts", "hidden")),), "replicated"),
    Entry(_MCORE + "mlp.router.bias", ((_HF + "mlp.router.bias", ("experts",)),), "replicated"),
    Entry(
        _LOCAL + "linear_fc1.weight",
        ((_GATE + ".weight", ("moe_ffn", "hidden")), (_UP + ".weight", ("moe_ffn", "hidden"))),
        "gate_up",
        te=_MCORE + "mlp.experts.linear_fc1.weight{e}",
    ),
    Entry(
        _LOCAL + "linear_fc1.bias",
        ((_GATE + ".bias", ("moe_ffn",)), (_UP + ".bias", ("moe_ffn",))),
        "gate_up",
        te=_MCORE + "mlp.experts.linear_fc1.bias{e}",
    ),
    Entry(
        _LOCAL + "linear_fc2.weight",
        ((_DOWN + ".weight", ("hidden", "moe_ffn")),),
        "row",
        te=_MCORE + "mlp.experts.linear_fc2.weight{e}",
    ),
    Entry(
        _LOCAL + "linear_fc2.bias",
        ((_DOWN + ".bias", ("hidden",)),),
        "replicated",
        te=_MCORE + "mlp.experts.linear_fc2.bias{e}",
    ),
)
STACKS = (
    Stack(_EXPERTS + "gate_up_proj", (_GATE + ".weight", _UP + ".weight"), transposed=True),
    Stack(_EXPERTS + "gate_up_proj_bias", (_GATE + ".bias", _UP + ".bias"), bias=True),
    Stack(_EXPERTS + "down_proj", (_DOWN + ".weight",), transposed=True),
    Stack(_EXPERTS + "down_proj_bias", (_DOWN + ".bias",), bias=True),
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
