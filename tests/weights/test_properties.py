"""A property of whole models: what `hf_to_mcore` gives to the ranks of any layout, `mcore_to_hf` makes the same model again.

Numbers of heads, groups, experts, layers, vocabulary and all degrees are drawn, of every family. The algebra of one tensor has
properties of its own (test_algebra.py).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mrl.parallel import ParallelDims
from mrl.weights import family_for, hf_to_mcore, mcore_to_hf
from mrl.weights.families import FAMILIES
from mrl.weights.hf_config import normalize
from mrl.weights.rules import expected_hf_names

MOST_RANKS = 24
FEW = st.integers(1, 3)


@st.composite
def layouts(draw: st.DrawFn, experts: bool) -> ParallelDims:
    tp, pp, dp = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    ep, etp = (draw(FEW), draw(FEW)) if experts else (1, tp)
    world = pp * math.lcm(tp * dp, ep * etp)
    assume(world <= MOST_RANKS)
    return ParallelDims(world, tp=tp, pp=pp, vpp=draw(st.integers(1, 2)) if pp > 1 else 1, ep=ep, etp=etp)


@st.composite
def configs(draw: st.DrawFn, model_type: str, layout: ParallelDims) -> dict[str, Any]:
    """A config.json whose sizes the degrees divide: as many KV heads as fit, also fewer than tp."""
    groups = draw(st.sampled_from([n for n in range(1, 9) if n % layout.tp == 0 or layout.tp % n == 0]))
    heads = math.lcm(groups, layout.tp) * draw(FEW)
    head_dim, parts = 2 * draw(FEW), math.lcm(layout.tp, layout.etp)
    if (heads + 2 * groups) * head_dim % layout.tp:  # rows of q, k and v together, as megatron cuts them
        head_dim *= layout.tp
    experts = layout.ep * draw(FEW)
    config = {
        "model_type": model_type, "vocab_size": draw(st.integers(1, 70)), "num_hidden_layers": layout.pp * layout.vpp + draw(FEW),
        "hidden_size": heads * head_dim, "num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": head_dim,
        "intermediate_size": parts * draw(FEW), "moe_intermediate_size": parts * draw(FEW),
        "shared_expert_intermediate_size": parts * draw(FEW), "num_experts": experts, "num_local_experts": experts,
        "n_routed_experts": experts, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1, "n_shared_experts": draw(FEW),
        "first_k_dense_replace": draw(st.integers(0, 2)), "mlp_only_layers": draw(st.lists(st.integers(0, 2), max_size=2)),
        "tie_word_embeddings": draw(st.booleans()), "attention_bias": draw(st.booleans()), "layer_types": None,
    }  # fmt: skip
    if model_type == "deepseek_v3":
        config |= {
            "num_key_value_heads": heads, "q_lora_rank": draw(st.none() | FEW), "kv_lora_rank": draw(FEW),
            "qk_nope_head_dim": draw(FEW), "qk_rope_head_dim": 2 * draw(FEW), "v_head_dim": draw(FEW),
        }  # fmt: skip
        config["head_dim"] = config["qk_rope_head_dim"]
    if model_type.startswith("qwen3_5"):
        keys = layout.tp * draw(FEW)
        config |= {
            "linear_num_key_heads": keys, "linear_num_value_heads": keys * draw(FEW), "linear_conv_kernel_dim": draw(FEW),
            "linear_key_head_dim": draw(FEW), "linear_value_head_dim": draw(FEW), "full_attention_interval": 1 + draw(FEW),
            "partial_rotary_factor": 1.0,
        }  # fmt: skip
    return normalize(config)


@settings(max_examples=25, deadline=None)
@given(st.data(), st.sampled_from(sorted(FAMILIES)), st.sampled_from(["local", "te"]))
def test_split_then_merge_is_the_identity(data: st.DataObject, model_type: str, spec: str):
    layout = data.draw(layouts(bool(FAMILIES[model_type].sparse)))
    config = data.draw(configs(model_type, layout))
    family, multiple = family_for(config), data.draw(st.sampled_from([1, 16]))
    shapes, at = expected_hf_names(family, config), 0
    weights = {}
    for name, shape in shapes.items():  # every entry is another number, so that equal means in the right place
        weights[name] = torch.arange(at, at + math.prod(shape)).reshape(shape)
        at += math.prod(shape)
    options = {"hf_config": config, "spec": spec, "vocab_multiple": multiple}
    shards = [
        (rank, *found)
        for rank in range(layout.world_size)
        for found in hf_to_mcore(weights.items(), family, layout, rank, **options)
    ]
    data.draw(st.randoms(use_true_random=False)).shuffle(shards)
    back = dict(mcore_to_hf(shards, family, layout, **options))
    assert back.keys() == weights.keys()
    assert [name for name in weights if not torch.equal(back[name], weights[name])] == []
