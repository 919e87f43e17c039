"""Describes the text model of Qwen3.5-MoE: Qwen3.5's layers, each with experts and one that every token visits, with a
gate."""

from typing import Any

from mrl.weights.families.qwen3_5 import FAMILY as QWEN3_5
from mrl.weights.families.qwen3_5 import LINEAR, linear_fields
from mrl.weights.fields import DENSE, EXPERTS, dense_fields, moe_fields, require
from mrl.weights.table import OWN_MTP, SHARED_GATE, Family, HFConfig, delta_sizes, every_layer, shared_mlp, sparse_mlp


def sizes(hf: HFConfig) -> dict[str, int]:
    return delta_sizes(hf) | {"shared_ffn": hf["shared_expert_intermediate_size"]}


def fields(hf: dict[str, Any]) -> dict[str, Any]:
    require(hf, "norm_topk_prob", (True, None))
    moe = moe_fields(hf, every_layer, normalise=True, shared_ffn=hf["shared_expert_intermediate_size"])
    dense = dense_fields(hf, qk_norm=True, partial_rotary=True, mrope=True)
    return dense | linear_fields(hf) | moe | {"moe_shared_expert_gate": True}


FAMILY = Family(
    model_type="qwen3_5_moe_text",
    layer=QWEN3_5.layer,
    linear=QWEN3_5.linear,
    is_linear=QWEN3_5.is_linear,
    sparse=sparse_mlp("mlp") + shared_mlp("mlp.shared_expert") + SHARED_GATE,
    is_sparse=every_layer,
    sizes=sizes,
    mtp=OWN_MTP,
    mtp_block="mtp.layers.0.",
    reads=DENSE | EXPERTS | LINEAR | {"moe_intermediate_size", "shared_expert_intermediate_size", "norm_topk_prob"},
    carries=QWEN3_5.carries,
    fields=fields,
)
