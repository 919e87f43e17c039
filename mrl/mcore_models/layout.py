"""Whether a layout fits a model: pure arithmetic, for the engine and for what is checked before any process starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mrl.errors import ConfigError
from mrl.parallel import ParallelDims, divisors_near, stage_layers

ALIGNED = 16
"""Bytes that rows of a grouped product's matrices are a multiple of (grouped.py)."""
EXPERTS: Mapping[str, str] = {
    "SequentialMLP": "one after another", "TEGroupedMLP": "grouped GEMM", "grouped_mm": "torch's grouped_mm",
}  # fmt: skip
"""How experts multiply, in words, by the class of megatron-core that they are of."""


def experts_fit(fields: Mapping[str, Any], dims: ParallelDims, itemsize: int) -> bool:
    """Whether a rank's experts have sizes that grouped products take. itemsize: bytes of a weight."""
    return not any(size * itemsize % ALIGNED for size in expert_sizes(fields, dims))


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


MOST_TOKENS = 2**17
"""Of a micro-batch on a rank, up to which `check_places` looks."""


def check_places(given: Mapping[str, Any], fields: Mapping[str, Any], dims: ParallelDims) -> None:
    """Refuses `moe_pad_expert_input_to_capacity` where it cannot work. given: `engine.megatron`.

    Each expert then has a number of places that follows from the rank's own number of tokens, whose all-to-all has the
    same size on every rank. megatron-core counts places in floating point and does not bound them by the tokens.
    """
    if not given.get("moe_pad_expert_input_to_capacity") or "num_moe_experts" not in fields:
        return
    key, factor = "engine.megatron.moe_pad_expert_input_to_capacity", given.get("moe_expert_capacity_factor")
    if dims.experts_span_replicas:
        why = f"is not for experts on ranks of several replicas, whose numbers of tokens differ ({dims.describe()})"
        raise ConfigError(
            key, True, why, "set engine.parallel.ep and etp so that their product divides tp, or leave it out"
        )
    if factor is None:
        raise ConfigError(key, True, "needs a number of places", "set engine.megatron.moe_expert_capacity_factor, too")
    experts, chosen = fields["num_moe_experts"], fields["moe_router_topk"]
    if any(math.ceil(n * chosen / experts * factor) > n for n in range(1, MOST_TOKENS)):
        why = f"gives an expert more places than there are tokens, of {experts} experts and {chosen} for each token"
        most = f"give at most {experts / chosen:g}, or a little less where that many is rounded up"
        raise ConfigError("engine.megatron.moe_expert_capacity_factor", factor, why, most)
