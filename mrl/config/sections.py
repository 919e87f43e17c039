"""Sections of the schema that stand alone: `engine.micro_batch`, `model.mtp` and `optimizer.muon`."""

from __future__ import annotations

import dataclasses
from typing import Literal

from mrl.config.fields import key


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroBatchConfig:
    tokens: int | Literal["auto"] | None = key(
        None,
        "most tokens of a micro-batch on one replica, padding included, before cp splits them. Excludes `size`. null: "
        "4096, or the longest sequence that the config allows. auto: as null, but on GPUs what `mrl plan` says fits "
        "and takes the least time, up to 32768 (docs/plan.md)",
        minimum=1,
    )
    size: int | None = key(None, "sequences in a micro-batch; excludes `tokens`", minimum=1)
    pad: bool = key(
        False,
        "pad every micro-batch to `tokens`, so that all have one shape (megatron backend). Padding counts in no loss, "
        "norm or metric. No sequence may be longer, and `tokens` must be a number",
    )

    @property
    def token_limit(self) -> int | None:
        """Returns `tokens`, but None for auto."""
        return None if self.tokens == "auto" else self.tokens


_DETACH = (
    "keep the gradient of the MTP loss inside the MTP layers. The model's hidden states, embedding and output layer "
    "get none of it, and MTP gradients are clipped by their own norm"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPConfig:
    """Training of MTP layers, which predict further tokens."""

    loss_weight: float = key(0.1, "factor of the MTP loss, a mean over the layers, in the whole loss", above=0)
    detach: bool = key(False, _DETACH)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyMTPConfig(MTPConfig):
    """Training of a policy's MTP layers, which by default leaves the policy as it is without them."""

    detach: bool = key(True, _DETACH)


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
