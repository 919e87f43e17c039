"""Causal attention for transformers models whose rows hold several documents, without a [T, T] mask.

Dimensions: `R` rows, `L` tokens in a row, `H` query heads, `G` key/value heads, `D` head size.

A packed micro-batch is one row of documents end to end. Each document's queries meet its own keys only, so the cost
is that of the documents and not of the row, and nothing of one document can reach another's result, not even by
rounding. A padded micro-batch has its padding on the right, where causal attention never looks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mrl.engine.fsdp.ulysses import Ulysses
from mrl.mcore_models.kv_cache import CachedStep

NAME = "mrl_documents"
ALONE = Ulysses()


def document_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    document_lengths: Sequence[int] | None = None,
    ulysses: Ulysses = ALONE,
    cached_step: CachedStep | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """transformers' attention interface. query: [R, H, L, D]; key, value: [R, G, L, D]. Returns [R, L, H, D].

    document_lengths: of the documents that one row holds, in order; None where a row is one document.
    ulysses: the ranks that share the rows; each then gives and gets its own places of them.
    cached_step: in generation, what the one row holds and where the keys and values before it are.
    """
    assert attention_mask is None, "documents are told apart by their lengths, not by a mask"
    if sliding_window is None:  # qwen2_moe keeps it for its masks and does not hand it on
        sliding_window = getattr(module, "sliding_window", None)
    if cached_step is not None:
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
        q = q.unflatten(1, (k.shape[1], -1))  # heads of a group are neighbours
        out = cached_step.attend(module.layer_idx, q, k, v, scale=scaling, window=sliding_window)
        return out.flatten(1, 2)[None], None

    out = ulysses.attend(
        _attend, query, key, value,
        dropout=dropout, scale=scaling, window=sliding_window, document_lengths=document_lengths,
    )  # fmt: skip
    return out, None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    dropout: float,
    scale: float | None,
    window: int | None,
    document_lengths: Sequence[int] | None,
) -> Tensor:
    """Whole rows: query [R, H, L, D]; key, value [R, G, L, D]. Returns [R, L, H, D]."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[2]
        mask = None
        if window is not None and window < length:
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - window)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, dropout_p=dropout, scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        ).transpose(1, 2)  # fmt: skip

    if document_lengths is None:
        return attend(query, key, value)
    assert query.shape[0] == 1 and sum(document_lengths) == query.shape[2], (
        f"documents of {sum(document_lengths)} tokens in {query.shape[0]} rows of {query.shape[2]}"
    )
    outputs, start = [], 0
    for length, run in itertools.groupby(document_lengths):  # neighbours of equal length are one batch
        count = len(list(run))
        of_run = slice(start, start + count * length)
        start = of_run.stop
        # [1, heads, count * length, D] -> [count, heads, length, D]
        parts = [t[0, :, of_run].unflatten(1, (count, length)).transpose(0, 1) for t in (query, key, value)]
        outputs.append(attend(*parts).flatten(0, 1))
    return torch.cat(outputs)[None]


ALL_ATTENTION_FUNCTIONS.register(NAME, document_attention)
