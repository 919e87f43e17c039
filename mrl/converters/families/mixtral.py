"""Mixtral: every layer sparse; on disk the experts are `block_sparse_moe.experts.N.w1` (gate), `w3` (up), `w2` (down).

transformers 5 renames them in memory and still writes these names.
"""

from mrl.converters.table import ATTENTION, Family, HFConfig, sparse_mlp


def is_sparse(config: HFConfig, layer: int) -> bool:
    """Every layer is."""
    return True


FAMILY = Family(
    model_type="mixtral",
    layer=ATTENTION,
    sparse=sparse_mlp("block_sparse_moe", "w1", "w3", "w2"),
    is_sparse=is_sparse,
)
