"""Describes Qwen2-MoE and Qwen1.5-MoE: Qwen2's attention; an expert that every token visits, with a gate; sparse layers
as in Qwen3-MoE."""

from typing import Any

from mrl.weights.families.qwen3_moe import is_sparse
from mrl.weights.fields import DENSE, EXPERTS, LAYER_WINDOWS, dense_fields, moe_fields, window_fields
from mrl.weights.table import (
    ATTENTION,
    DENSE_MLP,
    SHARED_GATE,
    Family,
    HFConfig,
    qkv_bias,
    shared_mlp,
    sparse_mlp,
)


def sizes(hf: HFConfig) -> dict[str, int]:
    return {"shared_ffn": hf["shared_expert_intermediate_size"]}


def fields(hf: dict[str, Any]) -> dict[str, Any]:
    moe = moe_fields(
        hf, is_sparse, normalise=bool(hf["norm_topk_prob"]), shared_ffn=hf["shared_expert_intermediate_size"]
    )
    gate = {"moe_shared_expert_gate": True}
    return dense_fields(hf, qkv_bias=bool(hf["qkv_bias"])) | window_fields(hf, hf["layer_types"]) | moe | gate


FAMILY = Family(
    model_type="qwen2_moe",
    layer=ATTENTION + qkv_bias("qkv_bias"),
    dense=DENSE_MLP,
    sparse=sparse_mlp("mlp") + shared_mlp("mlp.shared_expert") + SHARED_GATE,
    is_sparse=is_sparse,
    sizes=sizes,
    reads=DENSE | EXPERTS | LAYER_WINDOWS | {
        "qkv_bias", "moe_intermediate_size", "shared_expert_intermediate_size", "norm_topk_prob", "mlp_only_layers",
        "decoder_sparse_step",
    },
    fields=fields,
)  # fmt: skip
