"""Checks whether a layout and `engine.recompute_modules` fit a model, for the engine and before any process starts.

Nothing here imports megatron.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


RECOMPUTE_KEY = "engine.recompute_modules"
RECOMPUTED = ("layernorm", "mla_up_proj", "mlp", "moe")
WITHIN_MOE = ("shared_experts", "moe_act")
"""Modules that `engine.recompute: selective` computes again in the backward pass, under megatron-core's names.

    name            what is computed again                         what it saves, whatever attention runs
    layernorm       norms of hidden states, before attention and   two tensors of hidden size a layer
                    MLP or experts
    mlp             MLPs of dense layers                           3 x ffn size a token (SwiGLU)
    moe             experts with their router and exchange         3 x expert ffn size and 2 x hidden size, for each
                    between ranks                                  expert of a token
    shared_experts  shared experts alone                           3 x their ffn size a token
    moe_act         activations of grouped experts alone           the expert ffn size for each expert of a token
    mla_up_proj     latent attention's queries, keys and values    heads x (2 x qk + v head size) a token
                    from their latents
    core_attn       softmax(q k) v; of a gated delta net the       a sum a head and token: attention as it is computed
                    convolution and the rule                       here, and flash attention, keeps no scores. Of a
                                                                   gated delta net all that its chunks keep
"""


def recompute_modules(fields: Mapping[str, Any], modules: Sequence[str] | None, *, layer_spec: str | None) -> list[str]:
    """Returns the modules of `engine.recompute_modules`; if it is null, all of a layer except attention itself.
    Attention is among them if there are gated delta nets.

    The default of megatron is core attention alone, and flash attention keeps little but its output. Raises ConfigError
    for a name that recomputes nothing in this model.

    fields: as `fields_of` has them. layer_spec: te or local; None refuses a name only if both would.
    """
    # of a gated delta net the rule keeps most: some 8 KiB a token and value head of 128 channels
    names = (*RECOMPUTED, "core_attn") if any(fields.get("linear_attention_freq") or ()) else RECOMPUTED
    default = [name for name in names if _lacks(name, fields, layer_spec) is None]
    if modules is None:
        return default
    for name in modules:
        lack = _lacks(name, fields, layer_spec)
        if lack is not None:
            raise ConfigError(RECOMPUTE_KEY, name, lack, f"leave it out; {', '.join(default)} fit this model")
        if name in WITHIN_MOE and "moe" in modules:
            raise ConfigError(
                RECOMPUTE_KEY, name, "is within moe, which computes it again already", f"leave out {name} or moe"
            )
    return list(modules)


def _lacks(name: str, fields: Mapping[str, Any], layer_spec: str | None) -> str | None:
    """Returns what the model or its layer spec lacks for a name; None if it has it."""
    experts, latent = "num_moe_experts" in fields, bool(fields.get("multi_latent_attention"))
    if name in ("moe", "moe_act") and not experts:
        return "recomputes experts, and the model has none"
    if name == "moe_act" and layer_spec == "local":
        return "needs experts that are computed together, as engine.layer_spec te has them"
    if name == "shared_experts" and not fields.get("moe_shared_expert_intermediate_size"):
        return "recomputes shared experts, and the model has none"
    if name == "mlp" and experts and all(fields["moe_layer_freq"]):
        return "recomputes the MLPs of dense layers, and all layers of the model have experts"
    if name == "mla_up_proj" and not latent:
        return "recomputes a part of latent attention, which the model does not have"
    if name == "layernorm" and layer_spec == "te" and not experts and not latent:
        return "recomputes nothing: under engine.layer_spec te norms are part of the linear layers behind them"
    return None
