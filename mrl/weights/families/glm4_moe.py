"""Describes GLM-4.5 and later MoE models: a part of each head turns; DeepSeek-V3's router and shared experts; the first
layers dense."""

from typing import Any

from mrl.weights.fields import (
    DENSE,
    EXPERTS,
    SIGMOID_ROUTER,
    dense_fields,
    moe_fields,
    rotary_percent,
    sigmoid_router_fields,
)
from mrl.weights.table import (
    ATTENTION,
    DENSE_MLP,
    EXPERT_BIAS,
    MTP,
    QK_NORM,
    Family,
    HFConfig,
    only_where,
    qkv_bias,
    shared_mlp,
    sparse_mlp,
)


def is_sparse(config: HFConfig, layer: int) -> bool:
    return layer >= config["first_k_dense_replace"]


def sizes(hf: HFConfig) -> dict[str, int]:
    return {"shared_ffn": hf["moe_intermediate_size"] * hf["n_shared_experts"]}


def fields(hf: dict[str, Any]) -> dict[str, Any]:
    moe = moe_fields(hf, is_sparse, normalise=True, shared_ffn=sizes(hf)["shared_ffn"])
    dense = dense_fields(hf, qkv_bias=bool(hf["attention_bias"]), qk_norm=bool(hf["use_qk_norm"]), partial_rotary=True)
    return dense | {"rotary_percent": rotary_percent(hf)} | moe | sigmoid_router_fields(hf)


FAMILY = Family(
    model_type="glm4_moe",
    layer=ATTENTION + only_where("use_qk_norm", QK_NORM) + qkv_bias("attention_bias"),
    dense=DENSE_MLP,
    sparse=sparse_mlp("mlp") + EXPERT_BIAS + shared_mlp("mlp.shared_experts"),
    is_sparse=is_sparse,
    sizes=sizes,
    mtp=MTP,
    reads=DENSE | EXPERTS | SIGMOID_ROUTER | {
        "moe_intermediate_size", "n_shared_experts", "first_k_dense_replace", "use_qk_norm", "partial_rotary_factor",
        "num_mtp_layers", "num_nextn_predict_layers",  # layers past the last predict further tokens, not the next one
    },
    fields=fields,
)  # fmt: skip
