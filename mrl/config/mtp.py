"""The keys of `model.mtp`: how the layers of a model train that predict further tokens (MTP)."""

from __future__ import annotations

import dataclasses

from mrl.config.fields import key

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
