"""Names the classes that a decoder layer is built of, as `mrl.mcore_models.layers` chose them, for people to read.

Call `cpu_stand_in.prepare()` before this module is imported. Nothing is built, and no process group is needed.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from mrl.mcore_models import grouped, layers
from mrl.mcore_models.config import Config, LatentConfig
from mrl.ops import devices


@dataclasses.dataclass(frozen=True)
class LayerModules:
    """Holds names of classes."""

    attention: str  # of the scores and their sum over values
    norm: str  # before attention: a module of its own, or the linear layer that it is fused with
    linear: str  # of the attention's output
    experts: str | None  # None in a dense layer; grouped_mm where that is what `engine.moe.grouped_mm: auto` takes


def modules_of(config: Config | LatentConfig, layer: int) -> LayerModules:
    """Returns the classes of the decoder layer with the global number `layer`."""
    [spec] = layers.block_spec(config, [layer]).layer_specs
    parts = spec.submodules
    attention = parts.self_attention.submodules
    first = attention.up if config.multi_latent_attention else attention.linear_qkv
    norm = _name(parts.input_layernorm)
    return LayerModules(
        attention=_name(attention.core_attention),
        norm=_name(first) if norm == "IdentityOp" else norm,
        linear=_name(attention.linear_proj),
        experts=_experts(config, layers.mlp_submodules(spec)),
    )


def _experts(config: Config | LatentConfig, mlp: Any) -> str | None:
    experts = getattr(mlp, "experts", None)
    if experts is None:
        return None
    dtype, capability = config.params_dtype, devices.capability()
    if not config.add_bias_linear and grouped.is_chosen("auto", config.layer_spec, dtype, capability):
        return "grouped_mm"
    return _name(experts)


def _name(of: Any) -> str:
    """Returns the name of a class, or of the class that a maker of objects gives."""
    while not isinstance(of, type):
        if isinstance(of, functools.partial):
            of = of.func
        elif hasattr(of, "module"):
            of = of.module
        else:
            return str(getattr(of, "__name__", of))
    return of.__name__
