"""Qwen3: RMSNorm on each head's query and key, no biases."""

from typing import Any

from mrl.mcore_models.families.common import DENSE, dense_fields

READ = DENSE


def fields(hf: dict[str, Any]) -> dict[str, Any]:
    return dense_fields(hf, qk_norm=True)
