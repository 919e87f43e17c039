"""Describes Qwen3-MoE: Qwen3's attention; dense layers among sparse ones by `mlp_only_layers` and
`decoder_sparse_step`."""

from typing import Any

from mrl.weights.families.qwen3 import FAMILY as QWEN3
from mrl.weights.fields import DENSE, EXPERTS, dense_fields, moe_fields, window_fields
from mrl.weights.table import DENSE_MLP, Family, HFConfig, sparse_mlp


def is_sparse(config: HFConfig, layer: int) -> bool:
    """Decides like transformers' Qwen3MoeDecoderLayer: both keys count, and no experts means dense throughout."""
    if not config["num_experts"] or layer in (config.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % config["decoder_sparse_step"] == 0


def fields(hf: dict[str, Any]) -> dict[str, Any]:
    moe = moe_fields(hf, is_sparse, normalise=bool(hf.get("norm_topk_prob", False)))
    return dense_fields(hf, qk_norm=True) | window_fields(hf) | moe


FAMILY = Family(
    model_type="qwen3_moe",
    layer=QWEN3.layer,
    dense=DENSE_MLP,
    sparse=sparse_mlp("mlp"),
    is_sparse=is_sparse,
    reads=DENSE | EXPERTS | {
        "moe_intermediate_size", "norm_topk_prob", "mlp_only_layers", "decoder_sparse_step",
        "sliding_window", "use_sliding_window", "max_window_layers",  # transformers slides in every layer or in none
        "use_qk_norm",  # true in Qwen3-Coder; transformers norms whatever it says
    },
    fields=fields,
)  # fmt: skip
