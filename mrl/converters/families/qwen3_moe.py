"""Qwen3-MoE: Qwen3's attention; dense layers among sparse ones by `mlp_only_layers` and `decoder_sparse_step`."""

from mrl.converters.families.qwen3 import FAMILY as QWEN3
from mrl.converters.table import DENSE_MLP, Family, HFConfig, sparse_mlp


def is_sparse(config: HFConfig, layer: int) -> bool:
    """As transformers' Qwen3MoeDecoderLayer decides: both keys count, and no experts means dense throughout."""
    if not config["num_experts"] or layer in (config.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % config["decoder_sparse_step"] == 0


FAMILY = Family(
    model_type="qwen3_moe",
    layer=QWEN3.layer,
    dense=DENSE_MLP,
    sparse=sparse_mlp("mlp", "gate_proj", "up_proj", "down_proj"),
    is_sparse=is_sparse,
)
