"""Lists the families that mrl converts and trains, by the `model_type` of their config.json: one module here for each.

A module here that defines `FAMILY` is a family; nothing else lists them. docs/families.md shows how one is added.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from mrl.errors import ModelError
from mrl.weights.composites import COMPOSITES, composite
from mrl.weights.fields import NEUTRAL, is_off
from mrl.weights.json_file import shorten_value
from mrl.weights.quantized import check_readable
from mrl.weights.table import Family, HFConfig

_MODULES = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
FAMILIES: dict[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in _MODULES}


def family_of(model_type: Any) -> Family | None:
    """Returns the family of a `model_type`, of a composite that of its text part; None if mrl has no table of it."""
    if model_type in COMPOSITES:
        return composite(FAMILIES[COMPOSITES[model_type]], model_type)
    return FAMILIES.get(model_type)


def family_for(hf_config: HFConfig) -> Family:
    """Returns the family of a model; ModelError when it is not supported."""
    model_type = hf_config.get("model_type")
    family = family_of(model_type)
    if family is None:
        raise ModelError(
            "config.json",
            why=f"model_type {shorten_value(model_type)} is not supported",
            fix=f"supported are {', '.join(sorted({*FAMILIES, *COMPOSITES}))}",
        )
    return family


def fields_of(hf: dict[str, Any]) -> dict[str, Any]:
    """Returns keyword arguments of megatron's TransformerConfig that the architecture decides. hf: a normalised
    config.json.

    Every field of config.json is accounted for. The family reads it, or it is known not to change the maths (`NEUTRAL`,
    and private names), or its value is off. Otherwise the model is refused with the field's name.
    """
    family = family_of(hf["model_type"])
    if family is None:
        raise ModelError(
            "config.json",
            why=f"model_type {shorten_value(hf['model_type'])} is not supported by the megatron engine",
            fix=f"use one of {', '.join([*FAMILIES, *COMPOSITES])}, or engine.backend=fsdp",
        )
    check_readable(hf.get("quantization_config"))
    for name, value in hf.items():
        if name == "quantization_config":
            continue
        if not (name.startswith("_") or name in NEUTRAL or name in family.reads or is_off(value)):
            raise ModelError(
                "config.json",
                why=f"{name} = {shorten_value(value)} may change the maths and the {hf['model_type']} model "
                "of the megatron engine does not know it",
                fix="remove the field if it does not matter, or use engine.backend=fsdp",
            )
    return family.fields(hf)
