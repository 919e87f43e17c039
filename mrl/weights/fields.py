"""Maps a Hugging Face config to fields of megatron's TransformerConfig, for families to share. Plain data, no megatron.

It has the fields of a pre-norm, gated, rotary decoder, and those that do not change the maths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F

from mrl.errors import ModelError
from mrl.weights.json_file import shorten_value

NEUTRAL = frozenset("""
    architectures attn_implementation _attn_implementation auto_map bos_token_id chunk_size_feed_forward dtype
    eos_token_id finetuning_task gradient_checkpointing id2label initializer_range is_decoder is_encoder_decoder
    is_llama_config label2id max_position_embeddings max_length model_type _name_or_path name_or_path num_labels
    output_attentions output_hidden_states output_router_logits pad_token_id pretraining_tp problem_type return_dict
    rope_interleaved router_aux_loss_coef task_specific_params tie_word_embeddings tokenizer_class torch_dtype
    torchscript transformers.js_config transformers_version use_cache vocab_size sep_token_id decoder_start_token_id
    classifier_dropout use_bfloat16 min_length do_sample max_sequence_length unsloth_fixed unsloth_version
""".split())  # fmt: skip  # noqa: SIM905
"""Fields that no family has to read: names, tokens, outputs, training hints, and those that the loader handles itself.

Llama 1 and Vicuna have max_sequence_length next to max_position_embeddings; transformers reads the latter."""

DENSE = frozenset("""
    hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act
    rms_norm_eps rope_theta rope_scaling rope_parameters attention_dropout attention_bias mlp_bias
""".split())  # fmt: skip  # noqa: SIM905
"""Fields that `dense_fields` reads."""

EXPERTS = frozenset(["num_experts", "num_local_experts", "num_experts_per_tok"])
"""Fields that `moe_fields` reads."""

HINTS = frozenset(["aux_loss_alpha", "seq_aux", "ep_size", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"])
"""Fields that families read although they do not change what a model computes."""

LAYER_WINDOWS = frozenset(["sliding_window", "use_sliding_window", "max_window_layers", "layer_types"])
"""Fields that decide which layers have a sliding window; transformers makes `layer_types` of the others."""


def is_off(value: Any) -> bool:
    """Returns whether a field is off: None, False, 0, or empty."""
    return not value


def dense_fields(
    hf: dict[str, Any],
    *,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    partial_rotary: bool = False,
    yarn: bool = False,
    mrope: bool = False,
) -> dict[str, Any]:
    """Returns the fields of a decoder layer with grouped-query attention, RMSNorm and SwiGLU.

    Raises ModelError on values that are not supported.
    """
    require(hf, "hidden_act", ("silu",))
    require(hf, "mlp_bias", (False, None))
    if not qkv_bias:
        require(hf, "attention_bias", (False, None))
    check_rope(hf, partial_supported=partial_rotary, yarn_supported=yarn, mrope_supported=mrope)
    heads = hf["num_attention_heads"]
    return {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf.get("intermediate_size") or hf["moe_intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": hf.get("num_key_value_heads") or heads,
        "kv_channels": hf.get("head_dim") or hf["hidden_size"] // heads,
        "layernorm_epsilon": hf["rms_norm_eps"],
        "attention_dropout": hf.get("attention_dropout") or 0.0,
        "add_qkv_bias": qkv_bias,
        "qk_layernorm": qk_norm,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
    }


def window_fields(hf: dict[str, Any], types: list[str] | None = None) -> dict[str, Any]:
    """Returns the fields of a sliding window. A token sees `sliding_window` tokens with its own; megatron counts those
    to the left.

    types: "full_attention" or "sliding_attention" for each layer; None for families whose layers all slide.
    """
    window, layers = hf.get("sliding_window"), hf["num_hidden_layers"]
    types = ["sliding_attention"] * layers if types is None else types
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown or len(types) != layers:
        raise ModelError(
            "config.json",
            why=f"layer_types must name full_attention or sliding_attention for each of the {layers} layers",
            fix=f"got {shorten_value(unknown or len(types))}",
        )
    if not window:
        return {}
    return {"window_size": (window - 1, 0), "window_attn_skip_freq": [int(t == "sliding_attention") for t in types]}


def moe_fields(
    hf: dict[str, Any], is_sparse: Callable[[dict[str, Any], int], bool], *, normalise: bool,
    ffn: str = "moe_intermediate_size", shared_ffn: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Returns the fields of a top-k router over SwiGLU experts. The router computes in fp32.

    `is_sparse`: whether a layer has experts. `ffn`: the key with the channels of an expert.

    `normalise`: the weights of the chosen experts sum to 1, which is a softmax over the chosen logits alone.
    `shared_ffn`: channels of an expert for every token; 0 for none.
    """
    experts, topk = hf["num_experts"], hf["num_experts_per_tok"]
    if topk < 2 and normalise:
        raise ModelError(
            "config.json",
            why=f"num_experts_per_tok = {topk} with normalised weights leaves the router without a gradient",
            fix="2 or more are supported",
        )
    return {
        "num_moe_experts": experts,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": hf[ffn],
        "moe_layer_freq": [int(is_sparse(hf, layer)) for layer in range(hf["num_hidden_layers"])],
        # a softmax over all experts before the choice puts Mixtral's logits off by 0.99
        "moe_router_pre_softmax": not normalise,
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
        **({"moe_shared_expert_intermediate_size": shared_ffn} if shared_ffn else {}),
    }


def sigmoid_router_fields(hf: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of DeepSeek-V3's router (arXiv 2412.19437, eq. 12-16), over those of `moe_fields`.

    Scores are sigmoids. A bias that nothing trains here is added to choose experts. Experts are chosen from
    `topk_group` of `n_group` groups: those with the highest sum of their two best scores. The weights of the chosen sum
    to `routed_scaling_factor`.
    """
    require(hf, "norm_topk_prob", (True,))
    require(hf, "scoring_func", ("sigmoid",))
    require(hf, "topk_method", ("noaux_tc",))  # transformers writes none, and the bias is in the weights all the same
    groups, chosen, topk = hf["n_group"] or 1, hf["topk_group"] or 1, hf["num_experts_per_tok"]
    limits = {}
    if chosen < groups:
        if topk // chosen != 2:  # megatron sums the best topk // topk_group of a group, transformers the best two
            raise ModelError(
                "config.json",
                why=f"num_experts_per_tok = {topk} with topk_group = {chosen} of n_group = {groups} "
                "is not supported by the megatron engine",
                fix=f"supported: {2 * chosen} to {3 * chosen - 1}, or topk_group = n_group",
            )
        # a choice from all groups puts DeepSeek-V3's logits off by 2.65
        limits = {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
    return limits | {
        "moe_router_pre_softmax": False,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": float(hf["routed_scaling_factor"]),
    }


SIGMOID_ROUTER = frozenset("""
    norm_topk_prob scoring_func topk_method n_group topk_group routed_scaling_factor n_routed_experts
""".split())  # fmt: skip  # noqa: SIM905
"""Fields that `sigmoid_router_fields` reads."""


ROPE_TYPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
"""Type of rotary embedding -> keys of `rope_parameters` that it needs, and keys that it may have."""
ROPE_FIELDS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
"""Keys that any type may have: transformers writes the last one next to every scaling."""


def rotary_percent(hf: Mapping[str, Any]) -> float:
    """Returns the part of each head that turns."""
    return float((hf.get("rope_parameters") or {}).get("partial_rotary_factor") or 1.0)


MROPE = ("mrope_section", "mrope_interleaved")
"""Keys for positions in images. Those of text are equal in each dimension, so the keys change nothing there."""


def check_rope(hf: dict[str, Any], *, partial_supported: bool, yarn_supported: bool, mrope_supported: bool) -> None:
    """Refuses rotary scalings that `inverse_frequencies` does not compute."""
    if not partial_supported:
        require({"partial_rotary_factor": rotary_percent(hf)}, "partial_rotary_factor", (1,))
    rope = {**(hf.get("rope_parameters") or {}), **(hf.get("rope_scaling") or {})}
    kind = rope.get("rope_type", "default")
    supported = [name for name in ROPE_TYPES if name != "yarn" or yarn_supported]
    if kind not in supported:
        raise ModelError(
            "config.json",
            why=f"rope_scaling type {shorten_value(kind)} is not supported by the megatron engine",
            fix=f"supported: {', '.join(supported)}",
        )
    needed, optional = ROPE_TYPES[kind]
    missing = [name for name in needed if rope.get(name) is None]
    if missing:
        raise ModelError(
            "config.json",
            why=f"rope_scaling of type {kind} lacks {', '.join(missing)}",
            fix="get the model's config.json again",
        )
    for name, value in rope.items():
        if name not in needed + optional + ROPE_FIELDS + (MROPE if mrope_supported else ()) and value is not None:
            raise ModelError(
                "config.json",
                why=f"rope_parameters.{name} = {shorten_value(value)} has no meaning in rotary embeddings "
                f"of type {kind} to the megatron engine",
                fix="remove it if it does not matter, or use engine.backend=fsdp",
            )


def require(hf: dict[str, Any], name: str, allowed: tuple) -> None:
    if name in hf and hf[name] not in allowed:
        raise ModelError(
            "config.json",
            why=f"{name} = {shorten_value(hf[name])} is not supported by the megatron engine",
            fix=f"supported: {', '.join(map(repr, allowed))}",
        )
