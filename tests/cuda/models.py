"""Published models by their sizes: what config.json of each says that shapes follow from. Layers are cut by each case."""

from __future__ import annotations

import json
import math
import struct
import tempfile
from pathlib import Path
from typing import Any

ROPE = {"rope_type": "default", "rope_theta": 1000000.0}
COMMON: dict[str, Any] = {
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
    "rope_parameters": ROPE, "attention_bias": False,
}  # fmt: skip


def _sizes(hidden: int, ffn: int, layers: int, heads: int, groups: int, vocab: int, head: int | None = None) -> dict:
    return {
        "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": groups, "vocab_size": vocab, "head_dim": head or hidden // heads,
    }  # fmt: skip


def _moe(experts: int, top: int, ffn: int, **more: Any) -> dict:
    return {"num_experts": experts, "num_experts_per_tok": top, "moe_intermediate_size": ffn, **more}


DELTA_NETS = {  # of the layers of Qwen3.5's text models but for every fourth
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "rope_parameters": ROPE | {"partial_rotary_factor": 0.25},
}  # fmt: skip

MODELS: dict[str, dict[str, Any]] = {
    # name of the repository on the hub: its config.json
    "meta-llama/Llama-3.1-8B": {"model_type": "llama", **_sizes(4096, 14336, 32, 32, 8, 128256)},
    "meta-llama/Llama-3.2-1B": {"model_type": "llama", **_sizes(2048, 8192, 16, 32, 8, 128256), "tie_word_embeddings": True},
    "mistralai/Mistral-7B-v0.1": {
        "model_type": "mistral", **_sizes(4096, 14336, 32, 32, 8, 32000), "sliding_window": 4096,
    },
    "Qwen/Qwen2.5-7B": {"model_type": "qwen2", **_sizes(3584, 18944, 28, 28, 4, 152064)},
    "Qwen/Qwen3-8B": {"model_type": "qwen3", **_sizes(4096, 12288, 36, 32, 8, 151936, 128)},
    "Qwen/Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", **_sizes(2048, 6144, 48, 32, 4, 151936, 128), **_moe(128, 8, 768, norm_topk_prob=True),
    },
    "allenai/OLMoE-1B-7B-0924": {
        "model_type": "olmoe", **_sizes(2048, 1024, 16, 16, 16, 50304), "num_experts": 64, "num_experts_per_tok": 8,
    },
    "Qwen/Qwen1.5-MoE-A2.7B": {
        "model_type": "qwen2_moe", **_sizes(2048, 5632, 24, 16, 16, 151936),
        **_moe(60, 4, 1408, shared_expert_intermediate_size=5632),
    },
    "zai-org/GLM-4.5-Air": {
        "model_type": "glm4_moe", **_sizes(4096, 10944, 46, 96, 8, 151552, 128), "n_routed_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0, "use_qk_norm": False, "attention_bias": True, "partial_rotary_factor": 0.5,
        "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1,
    },
    "deepseek-ai/DeepSeek-V3": {
        "model_type": "deepseek_v3", **_sizes(7168, 18432, 61, 128, 128, 129280), "head_dim": 64,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
        "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
    },
    "openai/gpt-oss-20b": {
        "model_type": "gpt_oss", **_sizes(2880, 2880, 24, 64, 8, 201088, 64), "num_local_experts": 32,
        "num_experts_per_tok": 4, "sliding_window": 128, "attention_bias": True, "swiglu_limit": 7.0,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "original_max_position_embeddings": 4096, "truncate": False,
        },
    },
    "mistralai/Mixtral-8x7B-v0.1": {
        "model_type": "mixtral", **_sizes(4096, 14336, 32, 32, 8, 32000), "num_local_experts": 8,
        "num_experts_per_tok": 2, "sliding_window": None,
    },
    "Qwen/Qwen3.5-9B": {"model_type": "qwen3_5_text", **_sizes(4096, 12288, 32, 16, 4, 248320, 256), **DELTA_NETS},
    "Qwen/Qwen3.5-35B-A3B": {
        "model_type": "qwen3_5_moe_text", **_sizes(2048, 512, 40, 16, 2, 248320, 256), **DELTA_NETS,
        **_moe(256, 8, 512, shared_expert_intermediate_size=512),
    },
}  # fmt: skip


def fewer_experts(name: str, count: int) -> dict[str, Any]:
    """Returns what config.json of a model with fewer experts says instead; nothing of a dense one."""
    return {key: count for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in MODELS[name]}


def write(name: str, folder: Path, layers: int | None = None, **changes: Any) -> Path:
    """Writes config.json of a model, with other numbers of layers if asked; returns its folder."""
    fields = COMMON | MODELS[name] | changes
    if layers is not None:
        fields["num_hidden_layers"] = layers
        if "layer_types" in fields:
            fields["layer_types"] = fields["layer_types"][:layers]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def write_zeros(folder: Path) -> None:
    """Writes weights that are zeros, as a file with a hole in it: it takes no place on the disk."""
    from mrl.weights.families import family_for
    from mrl.weights.hf_config import read_hf_config
    from mrl.weights.rules import expected_hf_names

    hf = read_hf_config(str(folder))
    header, end = {}, 0
    for name, shape in expected_hf_names(family_for(hf), hf, head="lm").items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def read_all() -> None:
    """Reads every config.json once: transformers imports much for the first of each type."""
    from mrl.weights.hf_config import read_hf_config

    with tempfile.TemporaryDirectory() as folder:
        for name in MODELS:
            read_hf_config(str(write(name, Path(folder))))
