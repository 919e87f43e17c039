"""Llama 2 and 3, SmolLM2 and other models with `model_type: llama`."""

from typing import Any

from mrl.mcore_models.families.common import DENSE, dense_fields

READ = DENSE


def fields(hf: dict[str, Any]) -> dict[str, Any]:
    return dense_fields(hf)
