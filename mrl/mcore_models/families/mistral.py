"""Mistral: Llama's layers with a sliding window in every layer."""

from typing import Any

from mrl.mcore_models.families.common import DENSE, dense_fields, window_fields

READ = DENSE | {"sliding_window"}


def fields(hf: dict[str, Any]) -> dict[str, Any]:
    return dense_fields(hf) | window_fields(hf)
