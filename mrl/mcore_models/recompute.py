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

Nothing here imports megatron: it is asked before processes start, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mrl.errors import ConfigError

KEY = "engine.recompute_modules"
DEFAULT = ("layernorm", "mla_up_proj", "mlp", "moe")
WITHIN_MOE = ("shared_experts", "moe_act")


def recompute_modules(fields: Mapping[str, Any], modules: Sequence[str] | None, *, layer_spec: str | None) -> list[str]:
    """Returns the modules of `engine.recompute_modules`; if it is null, all of a layer except attention itself.
    Attention is among them if there are gated delta nets.

    The default of megatron is core attention alone, and flash attention keeps little but its output. Raises ConfigError
    for a name that recomputes nothing in this model.

    fields: as `fields_of` has them. layer_spec: te or local; None refuses a name only if both would.
    """
    # of a gated delta net the rule keeps most: some 8 KiB a token and value head of 128 channels
    names = (*DEFAULT, "core_attn") if any(fields.get("linear_attention_freq") or ()) else DEFAULT
    default = [name for name in names if _lacks(name, fields, layer_spec) is None]
    if modules is None:
        return default
    for name in modules:
        lack = _lacks(name, fields, layer_spec)
        if lack is not None:
            raise ConfigError(KEY, name, lack, f"leave it out; {', '.join(default)} fit this model")
        if name in WITHIN_MOE and "moe" in modules:
            raise ConfigError(KEY, name, "is within moe, which computes it again already", f"leave out {name} or moe")
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
