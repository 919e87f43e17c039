"""Describes Qwen2 and Qwen2.5: biases on q, k and v; an optional sliding window from layer `max_window_layers` on."""

from typing import Any

from mrl.weights.fields import DENSE, LAYER_WINDOWS, dense_fields, window_fields
from mrl.weights.table import ATTENTION, DENSE_MLP, Family, qkv_bias


def fields(hf: dict[str, Any]) -> dict[str, Any]:
    return dense_fields(hf, qkv_bias=True) | window_fields(hf, hf["layer_types"])


FAMILY = Family(
    model_type="qwen2",
    layer=ATTENTION + qkv_bias(),
    dense=DENSE_MLP,
    reads=DENSE | LAYER_WINDOWS,
    fields=fields,
)
