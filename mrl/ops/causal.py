"""Computes causal attention by the leanest way that a device has for it. The local spec's layers use it, and prompts in
generation under every spec and engine.

Dimensions: `N` sequences of one length, `H` query heads and `G` key-value heads, `Q` queries and `K` keys, `D` head
size of queries and keys, `V` of values. Queries stand at the end: query `i` is at position `K - Q + i` of the keys.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mrl.ops import flash
from mrl.ops.masked import ScoreRule, causal_mask, explicit_attention

AttentionKind = Literal["sdpa", "flash", "blocks"]
"""torch's own `scaled_dot_product_attention`; flash.py; or scores that are written out, block by block."""

MAX_SCORES = 2**26
"""Most scores that are written out at once if no kernel serves: 256 MiB in fp32, a few times over."""


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scoring: ScoreRule,
    *,
    dropout: float = 0.0,
) -> Tensor:
    """Returns attention [N, H, Q, V] of query [N, H, Q, D], key [N, G, K, D] and value [N, G, K, V].

    Memory grows with Q + K. A flash kernel does that, or blocks of queries if there is none. No kernel has soft
    capping; on a GPU none has dropout, fp32 or heads wider than 256. The backward pass computes a block again instead
    of keeping its scores.
    """
    keys, sinks, softcap = key.shape[2], scoring.sinks, scoring.softcap
    window = None if scoring.window is None or scoring.window >= keys else scoring.window
    chosen = attention_kind(
        query, keys, value, window=window, sinks=sinks is not None, softcap=softcap is not None, dropout=dropout > 0
    )
    if chosen == "sdpa":
        return sdpa(query, key, value, None, scale=scoring.scale, dropout=dropout)
    if chosen == "flash":
        return flash.attend(query, key, value, scale=scoring.scale, window=window, sinks=sinks)
    return _in_blocks(
        query, *expand_to_query_heads(query, key, value), dataclasses.replace(scoring, window=window), dropout
    )


def _in_blocks(query: Tensor, key: Tensor, value: Tensor, scoring: ScoreRule, dropout: float) -> Tensor:
    """Computes `causal_attention` for `H == G`, by writing out the scores of some queries at a time."""
    queries, keys = query.shape[2], key.shape[2]
    plain = scoring.sinks is None and scoring.softcap is None
    most = flash.BLOCK if plain else max(1, min(flash.BLOCK, MAX_SCORES // (query.shape[0] * query.shape[1] * keys)))
    of_heads = None if scoring.sinks is None else scoring.sinks.view(1, -1, 1, 1)

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = causal_mask(q.shape[2], k.shape[2], scoring.window, q.device)
        if plain:
            return sdpa(q, k, v, mask, scale=scoring.scale, dropout=dropout)
        return explicit_attention(
            q, k, v, mask, scale=scoring.scale, sinks=of_heads, softcap=scoring.softcap, dropout=dropout
        )

    outs = []
    for rows, seen in flash.blocks(queries, keys, scoring.window, most):
        parts = query[:, :, rows], key[:, :, seen], value[:, :, seen]
        if torch.is_grad_enabled():
            # without dropout no random numbers are to be the same again; to read their state waits for the GPU
            outs.append(checkpoint(block, *parts, use_reentrant=False, preserve_rng_state=dropout > 0))
        else:
            outs.append(block(*parts))
    return torch.cat(outs, dim=2)


def attention_kind(
    query: Tensor, keys: int, value: Tensor, *, window: int | None, sinks: bool, softcap: bool = False, dropout: bool
) -> AttentionKind:
    """Returns how attention of tensors like these is computed; window: one that is shorter than the keys, or None."""
    queries = query.shape[2]
    if not (sinks or softcap) and window is None and queries == keys:
        return "sdpa"
    return "flash" if not softcap and not dropout and flash.has_kernel(query, value) else "blocks"


def sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scale: float, dropout: float) -> Tensor:
    """Calls torch's own attention. mask: [..., Q, K] bool, True for keys that a query sees; None for causal, with Q ==
    K."""
    if not query.is_cpu and (mask is not None or query.dtype == torch.float32):
        # only flash-attn's kernel knows grouped queries, and it knows no mask and no fp32; torch would write the
        # scores out
        key, value = expand_to_query_heads(query, key, value)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, dropout_p=dropout,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip


def expand_to_query_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Returns keys and values [N, G, K, D] repeated for each query head: [N, H, K, D]."""
    times = query.shape[1] // key.shape[1]
    if times == 1:
        return key, value
    return key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
