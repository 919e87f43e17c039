"""Qwen3-MoE: Qwen3's attention; a layer is sparse unless `mlp_only_layers` or `decoder_sparse_step` says it is dense."""

from typing import Any

from mrl.converters.families.qwen3_moe import is_sparse
from mrl.mcore_models.families.common import DENSE, dense_fields, moe_fields, window_fields

READ = DENSE | {
    "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "mlp_only_layers", "decoder_sparse_step",
    "sliding_window", "use_sliding_window", "max_window_layers",  # transformers slides in every layer or in none
}  # fmt: skip


def fields(hf: dict[str, Any]) -> dict[str, Any]:
    moe = moe_fields(
        hf,
        expert_ffn=hf["moe_intermediate_size"],
        sparse=[int(is_sparse(hf, layer)) for layer in range(hf["num_hidden_layers"])],
        normalise=bool(hf.get("norm_topk_prob", False)),
    )
    return dense_fields(hf, qk_norm=True) | window_fields(hf) | moe
