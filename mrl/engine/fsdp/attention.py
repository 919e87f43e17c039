"""Causal attention for transformers models whose rows hold several documents, without a [T, T] mask.

Dimensions: `R` rows, `L` tokens in a row, `H` query heads, `G` key/value heads, `D` head size.

A packed micro-batch is one row of documents end to end. Each document's queries meet its own keys only, so the cost
is that of the documents and not of the row. Nothing of one document can reach another's result, not even by rounding.
A padded micro-batch has its padding on the right, and causal attention never looks there.

A model asks for other attention by transformers' two interfaces: its mask and keyword arguments (soft capping, sinks).
A mask is kept as its rule (`DocumentMask`). Arguments are refused if they are neither supported nor harmless.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mrl.engine.fsdp.ulysses import NO_CONTEXT_PARALLEL, Ulysses
from mrl.errors import ModelError
from mrl.ops.causal import causal_attention
from mrl.ops.kv_cache import CachedStep
from mrl.ops.masked import ScoreRule
from mrl.ops.packed import Documents, has_packed_kernel, packed_attention, runs_of

NAME = "mrl_documents"

UNSUPPORTED = ("position_bias", "indices", "block_indices", "sinks", "head_mask")
"""Arguments that models of transformers give to attention, and that change what it computes."""


@dataclasses.dataclass(frozen=True)
class DocumentMask:
    """Holds the rule of a causal mask: how far back a token looks."""

    window: int | None = None  # tokens, itself included
    chunk: int | None = None  # tokens of a chunk, within which it looks


def mask_of_rule(*, config: Any = None, local_size: int | None = None, use_vmap: bool = False, **rule: object) -> Any:
    """Returns the rule of a mask in place of its tensor, by transformers' mask interface."""
    # transformers 5.23 (masking_utils.py) gives this argument for masks in both directions alone, and asks for vmap
    # if a model adds a mask function of its own: neither is a rule of `DocumentMask`.
    if "allow_is_bidirectional_skip" in rule:
        raise ModelError(_refused(config, "has attention in both directions"))
    if use_vmap:
        raise ModelError(_refused(config, "has a mask that is made of a function of its own"))
    if local_size is None:
        return DocumentMask()
    chunked = local_size == getattr(config, "attention_chunk_size", None)  # noqa: B009 - transformers' own default
    return DocumentMask(chunk=local_size) if chunked else DocumentMask(window=local_size)


def document_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: DocumentMask | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    documents: Documents | None = None,
    ulysses: Ulysses = NO_CONTEXT_PARALLEL,
    cached_step: CachedStep | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Returns attention [R, L, H, D], by transformers' interface. query: [R, H, L, D]; key, value: [R, G, L, D].

    sliding_window: read only if the model makes no mask. softcap, s_aux: [H], as `softcap` and `sinks` of `ScoreRule`.
    documents: those in the one row, in order; None if a row is one document.
    ulysses: the ranks that share the rows. Each then gives and gets its own positions, and has all heads' sinks.
    cached_step: in generation, the documents of the one row and the keys and values before them.
    """
    mask = _rule(module, attention_mask, sliding_window, is_causal, others)
    scoring = ScoreRule(query.shape[-1] ** -0.5 if scaling is None else scaling, mask.window, s_aux, softcap)
    if cached_step is None and ulysses.size == 1:
        attended = _in_one_call(query, key, value, scoring, mask, dropout, documents)
        if attended is not None:
            return attended, None
    return _by_length(module, query, key, value, mask, scoring, dropout, documents, ulysses, cached_step), None


def _in_one_call(
    query: Tensor, key: Tensor, value: Tensor, scoring: ScoreRule, mask: DocumentMask, dropout: float,
    documents: Documents | None,
) -> Tensor | None:  # fmt: skip
    """Returns attention [1, L, H, D] of a row of documents, or None if no kernel takes them as they are."""
    if documents is None:
        return None
    total = documents.total
    assert query.shape[0] == 1 and total == query.shape[2], (
        f"documents of {total} tokens in {query.shape[0]} rows of {query.shape[2]}"
    )
    # documents of one length are one call of torch's own attention, too
    several = torch.compiler.is_compiling() or documents.ragged
    if not several or mask.chunk is not None or not has_packed_kernel(query, value, scoring, dropout):
        return None
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    return packed_attention(q, k, v, documents.cu_seqlens, documents.max_seqlen, scoring)[None]


# The lengths of documents decide what it does. No two micro-batches have the same, and each would compile anew.
@torch.compiler.disable
def _by_length(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: DocumentMask, scoring: ScoreRule,
    dropout: float, documents: Documents | None, ulysses: Ulysses, cached_step: CachedStep | None,
) -> Tensor:  # fmt: skip
    if cached_step is not None:
        if mask.chunk is not None:
            raise ModelError(_refused(module, "has attention in chunks, with which nothing is generated yet"))
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
        q = q.unflatten(1, (k.shape[1], -1))  # heads of a group are neighbours
        return cached_step.attend(module.layer_idx, q, k, v, scoring).flatten(1, 2)[None]
    if scoring.sinks is not None:
        scoring = dataclasses.replace(scoring, sinks=ulysses.own_heads(scoring.sinks))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        chunks = (t.split(mask.chunk or max(1, t.shape[2]), dim=2) for t in (q, k, v))
        outs = [causal_attention(a, b, c, scoring, dropout=dropout) for a, b, c in zip(*chunks, strict=True)]
        return (outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)).transpose(1, 2)

    def whole_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attended = _in_one_call(q, k, v, scoring, mask, dropout, documents)
        return attend_per_document(attend, q, k, v, documents) if attended is None else attended

    return ulysses.attend(whole_rows, query, key, value)


def attend_per_document(
    attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, documents: Documents | None
) -> Tensor:
    """Calls `attend` with one document's tensors after the other. Returns [R, L, H, D]. documents: None if a row is
    one."""
    if documents is None:
        return attend(query, key, value)
    outputs = []
    for start, count, length in runs_of(documents.lengths):  # neighbours of equal length are one batch
        of_run = slice(start, start + count * length)
        # [1, heads, count * length, D] -> [count, heads, length, D]
        parts = [t[0, :, of_run].unflatten(1, (count, length)).transpose(0, 1) for t in (query, key, value)]
        outputs.append(attend(*parts).flatten(0, 1))
    return torch.cat(outputs)[None]


def _rule(
    module: torch.nn.Module,
    mask: DocumentMask | None,
    sliding_window: int | None,
    is_causal: bool | None,
    others: dict[str, object],
) -> DocumentMask:
    """Returns the rule of the mask. Raises ModelError for an argument that is neither supported nor harmless."""
    for name in UNSUPPORTED:
        if others.get(name) is not None:
            raise ModelError(_refused(module, f"gives {name} to attention"))
    if mask is not None and not isinstance(mask, DocumentMask):
        raise ModelError(_refused(module, "makes its own attention masks"))
    if is_causal is None and mask is None:
        is_causal = getattr(module, "is_causal", True)  # noqa: B009 - as transformers' own attention functions read it
    if is_causal is False and mask is None:
        raise ModelError(_refused(module, "has attention in both directions"))
    return DocumentMask(window=sliding_window) if mask is None else mask


def _refused(of: Any, why: str) -> str:
    config = getattr(of, "config", of)  # noqa: B009 - a module's, or the config itself
    return (
        f"config.json: model_type {getattr(config, 'model_type', type(of).__name__)!r} {why}, which backend fsdp does "
        "not support; use another model"
    )


# Without a mask function of the same name transformers makes no mask at all (5.23, masking_utils.py,
# _preprocess_mask_arguments), and a model's chunks of attention would be lost in silence.
ALL_ATTENTION_FUNCTIONS.register(NAME, document_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask_of_rule)
