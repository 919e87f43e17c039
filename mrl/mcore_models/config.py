"""megatron's TransformerConfig with what it cannot say about the families."""

from __future__ import annotations

import dataclasses

from megatron.core.transformer.transformer_config import TransformerConfig


@dataclasses.dataclass
class Config(TransformerConfig):
    """qk_norm_over_heads: the norms of queries and keys are over all heads together. rotary_percent: the part of each
    head that turns, its first channels."""

    qk_norm_over_heads: bool = False
    rotary_percent: float = 1.0
