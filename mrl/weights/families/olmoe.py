"""Describes OLMoE: a norm over all query heads together and one over all key heads; every layer sparse."""

from typing import Any

from mrl.weights.fields import DENSE, EXPERTS, dense_fields, moe_fields, require
from mrl.weights.table import ATTENTION, QK_NORM_OVER_HEADS, Family, every_layer, sparse_mlp


def fields(hf: dict[str, Any]) -> dict[str, Any]:
    require(hf, "clip_qkv", (None,))
    require(hf, "head_dim", (hf["hidden_size"] // hf["num_attention_heads"],))  # transformers sizes the norms by it
    moe = moe_fields(hf, every_layer, ffn="intermediate_size", normalise=bool(hf["norm_topk_prob"]))
    return dense_fields(hf, qk_norm=True) | {"qk_norm_over_heads": True} | moe


FAMILY = Family(
    model_type="olmoe",
    layer=ATTENTION + QK_NORM_OVER_HEADS,
    sparse=sparse_mlp("mlp"),
    is_sparse=every_layer,
    reads=DENSE | EXPERTS | {"norm_topk_prob", "clip_qkv"},
    fields=fields,
)
