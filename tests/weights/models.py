"""Tiny random Hugging Face models, saved by transformers, and the layouts that they are cut into."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from mrl.parallel import ParallelDims
from tests.engine import tiny

VOCAB = 131  # odd: needs padding at any tp
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
SMALL_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
ROUTED = {"n_routed_experts": 4, **SMALL_EXPERTS}
# family: what its config has beyond COMMON; one that is not here has what tests/engine/tiny.py gives it
MODELS = {
    "llama": {},
    "llama_bias": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 8},
    "qwen2": {},
    "qwen3": {},
    "qwen3_bias": {"attention_bias": True},
    "qwen3_moe": {"num_experts": 4, **SMALL_EXPERTS, "mlp_only_layers": [1]},
    "qwen3_moe_step": {"num_experts": 4, **SMALL_EXPERTS, "decoder_sparse_step": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 4},  # its norms are as wide as the hidden size
    "qwen2_moe": {
        "num_experts": 4,
        **SMALL_EXPERTS,
        "shared_expert_intermediate_size": 20,
        "mlp_only_layers": [1],
    },
    "glm4_moe": {**ROUTED, "n_shared_experts": 2, "use_qk_norm": True},
    "deepseek_v3_moe": {
        **ROUTED,
        "n_shared_experts": 2,
        "first_k_dense_replace": 2,
        "num_key_value_heads": 4,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 12,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "glm4_moe_bias": {**ROUTED, "attention_bias": True},
}
MODELS |= {
    family: fields
    for family, (model_type, fields) in tiny.FAMILIES.items()
    if family == model_type and not any(name.startswith(family) for name in MODELS)
}
MODELS["deepseek_v3_moe_q"] = MODELS["deepseek_v3_moe"] | {"q_lora_rank": None}
MOE = tuple(name for name, fields in MODELS.items() if any("experts" in field for field in fields))

DENSE_LAYOUTS = {
    "tp1": ParallelDims(),
    "tp2": ParallelDims(world_size=2, tp=2),
    "tp4": ParallelDims(world_size=4, tp=4),  # more than the 2 KV heads
    "pp2": ParallelDims(world_size=2, pp=2),
    "pp3_uneven": ParallelDims(world_size=3, pp=3),
    "pp2xvpp2": ParallelDims(world_size=2, pp=2, vpp=2),
    "tp2xpp2": ParallelDims(world_size=4, tp=2, pp=2),
    "tp2xdp2": ParallelDims(world_size=4, tp=2),
}
MOE_LAYOUTS = {
    "ep2": ParallelDims(world_size=2, ep=2),
    "tp2xep2_etp1": ParallelDims(world_size=2, tp=2, ep=2),
    "tp2xep2_etp2": ParallelDims(world_size=4, tp=2, ep=2, etp=2),
    "ep2xetp2": ParallelDims(world_size=4, ep=2, etp=2),
    "tp2xpp2xep2": ParallelDims(world_size=8, tp=2, pp=2, ep=2),
    "tp2xpp2xvpp2xep4": ParallelDims(world_size=8, tp=2, pp=2, vpp=2, ep=4),
}
LAYOUTS = DENSE_LAYOUTS | MOE_LAYOUTS


@dataclasses.dataclass(frozen=True)
class Saved:
    """A model folder and its weights as transformers saved them, by HF name."""

    path: Path
    weights: dict[str, torch.Tensor]


def save(
    folder: Path,
    name: str,
    *,
    tied: bool,
    dtype: torch.dtype = torch.float32,
    fields: Mapping[str, object] = MappingProxyType({}),
    **options: object,
) -> Path:
    """Save the random model `name` into `folder`; every weight random, norms and biases too. fields: of its config."""
    model_type = "deepseek_v3" if name.startswith("deepseek") else name.removesuffix("_bias").removesuffix("_step")
    config = CONFIG_MAPPING[model_type](**COMMON | MODELS[name] | fields, tie_word_embeddings=tied)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in (*model.parameters(), *(b for n, b in model.named_buffers() if n in model.state_dict())):
            parameter.normal_()
    model.to(dtype).save_pretrained(folder, **options)
    return folder
