"""The keys of the optimizer Muon."""

from __future__ import annotations

import dataclasses
from typing import Literal

from mrl.config.fields import key


@dataclasses.dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """Muon's own keys, by the names and meanings of megatron-core's `muon_*`."""

    momentum: float = key(0.95, "decay rate of the running average of gradients", minimum=0, maximum=0.9999)
    use_nesterov: bool = key(True, "Nesterov momentum: the update adds the gradient itself to the average")
    num_ns_steps: int = key(5, "Newton-Schulz steps that orthogonalise an update", minimum=1, maximum=99)
    scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = key(
        "spectral",
        "factor of an update of R rows and C columns, in this order: sqrt(max(R, C)), sqrt(R / C), sqrt(max(1, R / C))",
    )
    extra_scale_factor: float = key(
        0.2,
        "extra factor of an update. With spectral, 0.2 makes updates as large as AdamW's, so AdamW's lr and "
        "weight_decay fit",
        above=0,
        maximum=1000,
    )
    dtype: Literal["auto", "bfloat16", "float32"] = key(
        "auto", "dtype of the Newton-Schulz steps; auto is model.dtype", may_change=True
    )
