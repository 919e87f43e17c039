"""Tiny folders of models that read more than text, whose causal class in transformers is the text part alone."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

VOCAB = 131
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.15,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MROPE = {**ROPE, "partial_rotary_factor": 1.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
LINEAR = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"], "rope_parameters": MROPE,
}  # fmt: skip
EXPERTS = {
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
QWEN_VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16,
}  # fmt: skip
LLAMA_VISION = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vision_output_dim": 16,
    "image_size": 8, "patch_size": 4, "projector_input_dim": 16, "projector_output_dim": 16, "rope_parameters": ROPE,
}  # fmt: skip
MLLAMA_VISION = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 2, "intermediate_size": 16,
    "vision_output_dim": 32, "image_size": 8, "patch_size": 4, "intermediate_layers_indices": [0],
}  # fmt: skip
QWEN_TOKENS = {"image_token_id": 120, "video_token_id": 121, "vision_start_token_id": 122, "vision_end_token_id": 123}

# model_type: (fields of text_config, other sections and fields of config.json)
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_5": (LINEAR, {"vision_config": QWEN_VISION, **QWEN_TOKENS}),
    "qwen3_5_moe": ({**LINEAR, **EXPERTS}, {"vision_config": QWEN_VISION, **QWEN_TOKENS}),
    "qwen4_exp": (
        {
            **LINEAR, **EXPERTS, "hc_count": 2, "hc_lowrank": 8, "split_ngram_parts": 2, "indexer_n_heads": 2,
            "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 16, "indexer_compress_ratio": 4,
            "ple_layer_ids": [1], "ple_embed_dim": 16, "ngram_vocab_size_base": 40, "heads_per_ngram": 2,
            "make_ngram_vocab_size_divisible_by": 4,
        },
        {"vision_config": QWEN_VISION, **QWEN_TOKENS},
    ),
    "llama4": (
        {
            "intermediate_size_mlp": 48, "num_local_experts": 2, "moe_layers": [1], "attention_chunk_size": 16,
            "rope_parameters": ROPE,
        },
        {"vision_config": LLAMA_VISION},
    ),
    "mllama": ({"cross_attention_layers": [1], "rope_parameters": ROPE}, {"vision_config": MLLAMA_VISION}),
    "emu3": (
        {"attention_dropout": 0.0, "rope_parameters": ROPE},
        {
            "vq_config": {
                "codebook_size": 8, "embed_dim": 4, "base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1,
                "hidden_size": 32, "attn_resolutions": [],
            },
            "vocabulary_map": {"<image>": 120},
        },
    ),
    "dots3_note": (
        {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "kv_lora_rank": 16, "q_lora_rank": 16,
            "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 4, "index_topk": 8, "index_head_dim": 8,
            "index_n_heads": 2, "num_key_value_heads": 4, "shared_experts_intermediate_size": 16,
        },
        {
            "vision_config": {
                "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4,
                "adapter_in_dim": 16, "adapter_out_dim": 32, "mlp_layer_types": ["dense"],
            },
            "audio_config": {
                "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "feature_size": 8,
                "downsample_hidden_size": 8, "adapter_input_size": 16, "adapter_out_dim": 32, "max_position_embeddings": 32,
            },
            "image_token_id": 120, "video_token_id": 121, "audio_token_id": 122,
        },
    ),
}  # fmt: skip


def make_composite(folder: str, model_type: str, *, tied: bool = False, **fields: Any) -> str:
    """Saves a random fp32 model of vision and text in `folder` and returns it. fields: of its text_config."""
    of_text, others = KINDS[model_type]
    text = {**COMMON, "tie_word_embeddings": tied, **of_text, **fields}
    config = AutoConfig.for_model(model_type, text_config=text, tie_word_embeddings=tied, **others)
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder
