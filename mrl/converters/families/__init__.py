"""The families that mrl converts, by the `model_type` of their config.json."""

from __future__ import annotations

from mrl.converters.families import llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from mrl.converters.table import Family, HFConfig
from mrl.errors import ModelError

FAMILIES = {module.FAMILY.model_type: module.FAMILY for module in (llama, mistral, mixtral, qwen2, qwen3, qwen3_moe)}


def family_for(hf_config: HFConfig) -> Family:
    """The family of a model; ModelError when it is not supported."""
    model_type = hf_config.get("model_type")
    if model_type not in FAMILIES:
        raise ModelError(
            f"config.json: model_type {model_type!r} is not supported; supported are {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]
