"""Computes attention by a mask and by its formula, in memory that grows with queries times keys. Plain torch."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class ScoreRule:
    """Holds the settings by which a layer turns scores into weights."""

    scale: float
    window: int | None = None  # how many tokens a query sees, itself included; None for all
    sinks: Tensor | None = None  # [H] scores of a place without a value, as in `explicit_attention`
    softcap: float | None = None  # as in `explicit_attention`


def causal_mask(q_length: int, k_length: int, window: int | None, device: torch.device) -> Tensor:
    """Returns [q_length, k_length] bool, True for keys that a query may look at. Queries stand at the keys' end.

    A query sees at most `window` keys.
    """
    allowed = torch.ones(q_length, k_length, dtype=torch.bool, device=device).tril(k_length - q_length)
    return allowed if window is None else allowed.triu(k_length - q_length - window + 1)


def explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    scale: float,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Computes attention by its formula, for cases that torch's own call does not have.

    query: [..., H, Q, D]; key and value: [..., G, K, D]. mask: bool, True for keys that a query sees.

    sinks: [..., H, 1 or Q, 1]. The softmax has one more position, with this score and the value zero (arXiv 2309.17453,
    "zero sink", learned).

    softcap: scores `s` are `softcap * tanh(s / softcap)` (Gemma 2, arXiv 2408.00118).
    """
    groups = query.shape[-3] // key.shape[-3]
    key, value = (t.repeat_interleave(groups, -3) if groups > 1 else t for t in (key, value))
    scores = (query @ key.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)[..., : key.shape[-2]].to(value.dtype)
    return torch.dropout(weights, dropout, train=dropout > 0) @ value
