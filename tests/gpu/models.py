"""Small models that GPU kernels take: heads of 64, widths that divide by 32, sequences of up to 160 tokens."""

from __future__ import annotations

from typing import Any

VOCAB, SEQUENCES, LONGEST, MICRO_TOKENS = 1031, 12, 160, 512

_WIDE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 512, "initializer_range": 0.05, "layers": 4, "vocab": VOCAB,
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 128, "num_experts": 8}

# family of tests/engine/tiny.py -> fields of its config beside _WIDE
MODELS: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": {}, "qwen3": {}, "mistral": {"sliding_window": 32},
    "qwen3_moe": _EXPERTS, "olmoe": {"num_experts": 8, "intermediate_size": 128, "num_key_value_heads": 4},
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 128},
    "mixtral": {"num_local_experts": 8, "intermediate_size": 128},
    "glm4_moe": {"n_routed_experts": 8, "moe_intermediate_size": 128},
    "deepseek_v3": {
        "head_dim": 32, "num_key_value_heads": 4, "moe_intermediate_size": 128, "q_lora_rank": 96, "kv_lora_rank": 64,
        "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    },
    # with 0.5 and 0.7 an element lies on the limit, where rounding decides whether it has a gradient
    "gpt_oss": {"num_local_experts": 8, "intermediate_size": 128, "sliding_window": 32, "swiglu_limit": 1.5},
    "gemma2": {"sliding_window": 32, "query_pre_attn_scalar": 64}, "granite": {}, "gpt2": {}, "phi3": {
        "head_dim": None, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0 + i / 8 for i in range(32)],
            "long_factor": [1.0 + i for i in range(32)],
        }, "original_max_position_embeddings": 64,
    },
}  # fmt: skip
OF_MEGATRON = [name for name in MODELS if name not in ("gemma2", "granite", "gpt2", "phi3")]


def sizes(family: str) -> dict[str, Any]:
    """Arguments of `tiny.make_model`."""
    return {key: value for key, value in (_WIDE | MODELS[family]).items() if value is not None}
