"""Describes DeepSeek-V3 and R1, and Moonlight: latent attention, shared experts, a sigmoid router with groups; the
first layers dense."""

import math
from typing import Any

from mrl.weights.families.glm4_moe import is_sparse
from mrl.weights.fields import (
    DENSE,
    EXPERTS,
    SIGMOID_ROUTER,
    dense_fields,
    moe_fields,
    require,
    sigmoid_router_fields,
)
from mrl.weights.table import (
    DENSE_MLP,
    EXPERT_BIAS,
    LATENT_ATTENTION,
    MTP,
    Family,
    HFConfig,
    shared_mlp,
    sparse_mlp,
)


def sizes(hf: HFConfig) -> dict[str, int]:
    heads = hf["num_attention_heads"]
    return {
        "q_rank": hf["q_lora_rank"] or 0,
        "kv_rank": hf["kv_lora_rank"],
        "kv_down": hf["kv_lora_rank"] + hf["qk_rope_head_dim"],
        "latent_q": heads * (hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"]),
        "latent_kv": heads * (hf["qk_nope_head_dim"] + hf["v_head_dim"]),
        "latent_out": heads * hf["v_head_dim"],
        "shared_ffn": hf["moe_intermediate_size"] * hf["n_shared_experts"],
    }


def scale(hf: dict[str, Any]) -> float:
    """Returns the scale of the products of queries and keys: YaRN's `mscale_all_dim` makes it larger, twice."""
    scaling = hf["rope_scaling"] or {}
    all_dim, factor = scaling.get("mscale_all_dim") or 0, scaling.get("factor") or 1.0
    larger = 0.1 * all_dim * math.log(factor) + 1.0 if factor > 1 else 1.0
    return (hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"]) ** -0.5 * larger * larger


def fields(hf: dict[str, Any]) -> dict[str, Any]:
    require(hf, "num_key_value_heads", (hf["num_attention_heads"],))
    require(hf, "head_dim", (hf["qk_rope_head_dim"],))
    require(hf, "ep_size", (1, None))
    require(hf, "moe_layer_freq", (1, None))
    moe = moe_fields(hf, is_sparse, normalise=True, shared_ffn=sizes(hf)["shared_ffn"])
    latent = {
        "multi_latent_attention": True,
        "q_lora_rank": hf["q_lora_rank"],
        "kv_lora_rank": hf["kv_lora_rank"],
        "qk_head_dim": hf["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
        "v_head_dim": hf["v_head_dim"],
        "rope_interleave": bool(hf["rope_interleave"]),
        "latent_scale": scale(hf),
        "rope_type": "rope",
    }
    return dense_fields(hf, qk_norm=True, yarn=True) | latent | moe | sigmoid_router_fields(hf)


FAMILY = Family(
    model_type="deepseek_v3",
    layer=LATENT_ATTENTION,
    dense=DENSE_MLP,
    sparse=sparse_mlp("mlp") + EXPERT_BIAS + shared_mlp("mlp.shared_experts"),
    is_sparse=is_sparse,
    sizes=sizes,
    mtp=MTP,
    reads=DENSE | EXPERTS | SIGMOID_ROUTER | {
        "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim",
        "rope_interleave",
        "moe_intermediate_size", "n_shared_experts", "first_k_dense_replace", "moe_layer_freq", "ep_size",
        "num_mtp_layers", "num_nextn_predict_layers",  # layers past the last predict further tokens, not the next one
        "aux_loss_alpha", "seq_aux",  # hints for training
    },
    fields=fields,
)  # fmt: skip
