"""Checks whether a layout fits a model: pure arithmetic, for the engine and for checks before any process starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrl.errors import ConfigError
from mrl.parallel import ParallelDims, divisors_near, stage_layers

ALIGNMENT = 16
"""Bytes that rows of a grouped product's matrices are a multiple of (grouped.py)."""
EXPERTS: Mapping[str, str] = {
    "SequentialMLP": "one after another", "TEGroupedMLP": "grouped GEMM", "grouped_mm": "torch's grouped_mm",
}  # fmt: skip
"""How experts multiply, in words, by the class of megatron-core that they are of."""


def experts_fit(fields: Mapping[str, Any], dims: ParallelDims, itemsize: int) -> bool:
    """Returns whether grouped products take the sizes of a rank's experts. itemsize: bytes of a weight."""
    return not any(size * itemsize % ALIGNMENT for size in expert_sizes(fields, dims))


def expert_sizes(fields: Mapping[str, Any], dims: ParallelDims) -> tuple[int, int]:
    """Returns the hidden size and the width of an expert on a rank. fields: as `fields_of` has them."""
    return fields["hidden_size"], fields["moe_ffn_hidden_size"] // dims.etp


def check_layout(fields: Mapping[str, Any], dims: ParallelDims) -> None:
    """Refuses layouts that the model's sizes do not allow, by key."""

    def divides(key: str, degree: int, name: str, count: int) -> None:
        if count % degree:
            fits = divisors_near(count, degree)
            raise ConfigError(
                f"engine.parallel.{key}", degree, f"does not divide the model's {count} {name}", f"use one of {fits}"
            )

    divides("tp", dims.tp, "attention heads", fields["num_attention_heads"])
    divides("tp", dims.tp, "hidden channels", fields["hidden_size"])
    groups = fields["num_query_groups"]
    if groups % dims.tp and dims.tp % groups:
        raise ConfigError(
            "engine.parallel.tp",
            dims.tp,
            f"and the model's {groups} key-value heads do not divide one another",
            f"use a divisor or a multiple of {groups}",
        )
    if fields.get("linear_attention_freq"):
        heads = fields["linear_num_key_heads"]
        divides("tp", dims.tp, "key heads of linear attention", heads)
        divides("cp", dims.cp, f"key heads of linear attention on each of tp {dims.tp}", heads // dims.tp)
    divides("tp", dims.tp, "feed-forward channels", fields["ffn_hidden_size"])
    stage_layers(fields["num_layers"], dims.pp, dims.vpp)
    if "num_moe_experts" in fields:
        divides("ep", dims.ep, "experts", fields["num_moe_experts"])
        divides("etp", dims.etp, "expert channels", fields["moe_ffn_hidden_size"])
        if dims.etp > 1 and fields.get("add_bias_linear"):
            raise ConfigError(
                "engine.parallel.etp",
                dims.etp,
                "does not work for experts with biases, which megatron would add once a rank",
                "set it to 1",
            )
        if dims.tp > 1 and not dims.sp:
            raise ConfigError(
                "engine.parallel.sp", False, f"does not work for experts with tp {dims.tp}", "set it to auto or true"
            )
    elif dims.ep > 1:
        raise ConfigError("engine.parallel.ep", dims.ep, "needs a mixture-of-experts model", "set ep to 1")
