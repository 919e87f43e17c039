"""Mixtral: Mistral's attention, every layer sparse, weights of the chosen experts normalised."""

from typing import Any

from mrl.mcore_models.families.common import DENSE, dense_fields, moe_fields, window_fields

READ = DENSE | {"sliding_window", "num_experts", "num_local_experts", "num_experts_per_tok"}


def fields(hf: dict[str, Any]) -> dict[str, Any]:
    sparse = [1] * hf["num_hidden_layers"]
    moe = moe_fields(hf, expert_ffn=hf["intermediate_size"], sparse=sparse, normalise=True)
    return dense_fields(hf) | window_fields(hf) | moe
