"""Describes Mixtral: Mistral's attention, every layer sparse, weights of the chosen experts normalised.

On disk the experts are `block_sparse_moe.experts.N.w1` (gate), `w3` (up), `w2` (down). transformers 5 renames them in
memory and still writes these names.
"""

from typing import Any

from mrl.weights.fields import DENSE, EXPERTS, dense_fields, moe_fields, window_fields
from mrl.weights.table import ATTENTION, Family, every_layer, sparse_mlp


def fields(hf: dict[str, Any]) -> dict[str, Any]:
    moe = moe_fields(hf, every_layer, ffn="intermediate_size", normalise=True)
    return dense_fields(hf) | window_fields(hf) | moe


FAMILY = Family(
    model_type="mixtral",
    layer=ATTENTION,
    sparse=sparse_mlp("block_sparse_moe", "w1", "w3", "w2"),
    is_sparse=every_layer,
    reads=DENSE | EXPERTS | {"sliding_window"},
    fields=fields,
)
