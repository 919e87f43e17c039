"""Hugging Face config -> the fields of megatron's TransformerConfig, one file per family.

`fields_of(hf)` is the entry. Every field of config.json is accounted for: a family reads it, or it is known not to change
the maths (`NEUTRAL`, and private names), or its value is the one that changes nothing, or the model is refused with the field's name.
"""

from __future__ import annotations

from typing import Any

from mrl.errors import ModelError
from mrl.mcore_models.families import llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from mrl.mcore_models.families.common import NEUTRAL, harmless

FAMILIES = {
    "llama": llama, "mistral": mistral, "mixtral": mixtral, "qwen2": qwen2, "qwen3": qwen3, "qwen3_moe": qwen3_moe,
}  # fmt: skip


def fields_of(hf: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of TransformerConfig that the architecture decides; `hf` is a normalised config.json."""
    family = FAMILIES.get(hf["model_type"])
    if family is None:
        raise ModelError(
            f"config.json: model_type {hf['model_type']!r} is not supported by the megatron engine; use one of {', '.join(FAMILIES)}, or engine.backend=fsdp"
        )
    for name, value in hf.items():
        if not (name.startswith("_") or name in NEUTRAL or name in family.READ or harmless(value)):
            raise ModelError(
                f"config.json: {name} = {value!r} may change the maths and the {hf['model_type']} model of the megatron "
                "engine does not know it; remove the field if it does not matter, or use engine.backend=fsdp"
            )
    return family.fields(hf)
