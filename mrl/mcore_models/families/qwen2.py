"""Qwen2 and Qwen2.5: biases on query, key and value; an optional sliding window from layer `max_window_layers` on."""

from typing import Any

from mrl.mcore_models.families.common import DENSE, LAYER_WINDOWS, dense_fields, window_fields

READ = DENSE | LAYER_WINDOWS


def fields(hf: dict[str, Any]) -> dict[str, Any]:
    return dense_fields(hf, qkv_bias=True) | window_fields(hf, hf["layer_types"])
