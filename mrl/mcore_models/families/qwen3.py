"""Qwen3: RMSNorm on each head's query and key, no biases; windows as in Qwen2."""

from typing import Any

from mrl.mcore_models.families.common import DENSE, LAYER_WINDOWS, dense_fields, window_fields

READ = DENSE | LAYER_WINDOWS


def fields(hf: dict[str, Any]) -> dict[str, Any]:
    return dense_fields(hf, qk_norm=True) | window_fields(hf, hf["layer_types"])
