"""Describes Qwen3: RMSNorm on each head's query and key; biases only if `attention_bias` says so; windows as in
Qwen2."""

from typing import Any

from mrl.weights.fields import DENSE, LAYER_WINDOWS, dense_fields, window_fields
from mrl.weights.table import ATTENTION, DENSE_MLP, QK_NORM, Family, proj_bias, qkv_bias


def fields(hf: dict[str, Any]) -> dict[str, Any]:
    return dense_fields(hf, qk_norm=True) | window_fields(hf, hf["layer_types"])


FAMILY = Family(
    model_type="qwen3",
    layer=ATTENTION + QK_NORM + qkv_bias("attention_bias") + proj_bias("attention_bias"),
    dense=DENSE_MLP,
    reads=DENSE | LAYER_WINDOWS,
    fields=fields,
)
