"""Adds to megatron's TransformerConfig what the families need and it lacks."""

from __future__ import annotations

import dataclasses
from typing import Literal

from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig


@dataclasses.dataclass
class Config(TransformerConfig):
    """Is megatron's config with the fields that our modules read."""

    qk_norm_over_heads: bool = False  # the norms of queries and keys are over all heads together
    rotary_percent: float = 1.0  # the part of each head that turns, its first channels
    layer_spec: Literal["te", "local"] = "local"


@dataclasses.dataclass
class LatentConfig(MLATransformerConfig):
    """Is the same for models with multi-head latent attention."""

    qk_norm_over_heads: bool = False
    layer_spec: Literal["te", "local"] = "local"
    rope_interleave: bool = True  # channels that turn together are neighbours
    latent_scale: float = 1.0  # of the products of queries and keys


def config_class(fields: dict) -> type[Config] | type[LatentConfig]:
    """Returns the class that takes these fields."""
    return LatentConfig if fields.get("multi_latent_attention") else Config
