"""Computes causal attention of packed sequences of any lengths in one operator, forward and backward.

Dimensions: `T` tokens of `S` sequences, end to end. `H` query heads and `G` key-value heads. `D` head size.

On CUDA flash-attn's kernel takes them all at once. On a CPU neighbours of equal length are one call of torch's kernel,
with the bits of `causal_attention` of each length. They are operators of torch, so torch.compile takes them as they
are. The compiled code serves other lengths too, because lengths come as a tensor.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mrl.kernels import operators
from mrl.ops import devices, flash
from mrl.ops.masked import ScoreRule


@dataclasses.dataclass
class Documents:
    """Holds the lengths of sequences that lie end to end. Compiled code reads the numbers and not `lengths`, of which
    each would be a guard."""

    lengths: tuple[int, ...]
    cu_seqlens: Tensor  # [S + 1] int32 on the device: where each begins, and the end
    total: int  # tokens of all
    max_seqlen: int
    ragged: bool  # not all are of one length

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> "Documents":
        cu_seqlens = devices.tensor_on(device, [*itertools.accumulate(lengths, initial=0)], torch.int32)
        return cls(tuple(lengths), cu_seqlens, sum(lengths), max(lengths), len(set(lengths)) > 1)


def runs_of(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """Returns runs of neighbours of equal length: (first position, how many, length of each). Empty ones are none."""
    runs, start = [], 0
    for length, run in itertools.groupby(lengths):
        count = len(list(run))
        if length:
            runs.append((start, count, length))
        start += count * length
    return runs


def has_packed_kernel(query: Tensor, value: Tensor, scoring: ScoreRule, dropout: float) -> bool:
    """Returns whether `packed_attention` serves tensors like these."""
    size = query.shape[-1]
    if size != value.shape[-1] or scoring.softcap is not None or dropout > 0:
        return False
    return flash.has_kernel(query, value) and (query.is_cpu or size % 8 == 0)


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, scoring: ScoreRule
) -> Tensor:
    """Returns attention [T, H, D] of query [T, H, D], key and value [T, G, D].

    cu_seqlens, max_seqlen: as in `Documents`; all T positions belong to a sequence.
    On CUDA the backward pass repeats to the bit only if `torch.use_deterministic_algorithms` is on, as that of
    `causal_attention` (torch 2.13, aten/src/ATen/native/transformers/cuda/attention_backward.cu).
    """
    return _attention(query, key, value, cu_seqlens, max_seqlen, scoring.sinks, scoring.scale, scoring.window)[0]


# -- CUDA --------------------------------------------------------------------------------------------------------------


def _on_cuda(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, sinks: Tensor | None, scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns attention [T, H, D] and the logarithms of the sums [H, T], in fp32.

    With `cum_seq` the operator takes [T, heads, D] and returns sums without padding (torch 2.13,
    _meta_registrations.py, meta__flash_attention_forward; flash_attn/flash_api.cpp, mha_varlen_fwd). Its cu_seqlens are
    int32.
    """
    causal, sides = flash.causal_and_sides(_shorter(window, max_seqlen))
    out, sums, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, 0.0, causal, False, scale=scale, **sides
    )
    if sinks is not None:
        sums = flash.add_sinks(_one_row(out), sums[None], sinks)[0]
    return out, sums


def _back_on_cuda(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, cu_seqlens: Tensor,
    max_seqlen: int, sinks: Tensor | None, scale: float, window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    causal, sides = flash.causal_and_sides(_shorter(window, max_seqlen))
    unused = query.new_empty(0)  # the state of random numbers, which is read for dropout alone
    grads = torch.ops.aten._flash_attention_backward(
        grad, query, key, value, out, sums, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, 0.0, causal, unused, unused,
        scale=scale, **sides,
    )  # fmt: skip
    if sinks is None:
        return *grads, query.new_empty(0)
    return *grads, flash.sinks_gradient(_one_row(grad), _one_row(out), sums[None], sinks)


# -- a CPU -------------------------------------------------------------------------------------------------------------


def _on_cpu(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, sinks: Tensor | None, scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out, sums = _outputs(query)
    for start, count, length in runs_of(cu_seqlens.diff().tolist()):
        q, k, v = (_of_run(t, start, count, length) for t in (query, key, value))
        found, logarithms, _ = flash.on_cpu(q, k, v, scale, _shorter(window, length))
        if sinks is not None:
            logarithms = flash.add_sinks(found, logarithms, sinks)
        for whole, one in ((out, found), (sums.t(), logarithms)):
            _of_run(whole, start, count, length).copy_(one)
    return out, sums


def _back_on_cpu(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, cu_seqlens: Tensor,
    max_seqlen: int, sinks: Tensor | None, scale: float, window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    grads = [torch.empty_like(t) for t in (query, key, value)]
    of_sinks = None if sinks is None else torch.zeros_like(sinks)
    sums = sums.t().contiguous()  # as the kernel's: strides decide which exponentials are vectorized, and round so
    # the order in which autograd would add up the runs' gradients of sinks
    for start, count, length in reversed(runs_of(cu_seqlens.diff().tolist())):
        g, q, k, v, o, s = (_of_run(t, start, count, length) for t in (grad, query, key, value, out, sums))
        seen = _shorter(window, length)
        found = flash.back_on_cpu(g, q, k, v, o, s, [], scale, seen)
        for whole, one in zip(grads, found, strict=True):
            _of_run(whole, start, count, length).copy_(one)
        if sinks is not None and of_sinks is not None:
            if len(flash.key_ranges(length, length, seen)) > 1:
                o, s = o.contiguous(), s.contiguous()  # as joined blocks lie
            of_sinks += flash.sinks_gradient(g, o, s, sinks)
    return *grads, query.new_empty(0) if of_sinks is None else of_sinks


def _of_run(tensor: Tensor, start: int, count: int, length: int) -> Tensor:
    """Returns a view [count, heads, length, ..] of a run's part of [T, heads, ..].

    By one operator, as short runs are many.
    """
    (of_token, of_head, *rest), (_, heads, *sizes) = tensor.stride(), tensor.shape
    return tensor.as_strided(
        (count, heads, length, *sizes), (length * of_token, of_head, of_token, *rest),
        tensor.storage_offset() + start * of_token,
    )  # fmt: skip


# -- both --------------------------------------------------------------------------------------------------------------


def _shorter(window: int | None, length: int) -> int | None:
    return None if window is None or window >= length else window


def _one_row(tensor: Tensor) -> Tensor:
    """Returns a view [1, heads, T, D] of [T, heads, D]."""
    return tensor.transpose(0, 1)[None]


def _outputs(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """Returns attention and sums to be filled, with the strides of flash-attn's."""
    wide = torch.promote_types(query.dtype, torch.float32)
    return torch.empty_like(query), query.new_empty((query.shape[1], query.shape[0]), dtype=wide)


def _gradients(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, ...]:
    sinks = others[4]
    return *map(torch.empty_like, (query, key, value)), query.new_empty(0) if sinks is None else torch.empty_like(sinks)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, cu_seqlens, max_seqlen, sinks, *ctx.rule = inputs
    ctx.max_seqlen = max_seqlen
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, *output, cu_seqlens, sinks)


def _differentiate(ctx: Any, grad: Tensor, _of_sums: None) -> tuple[Tensor | None, ...]:
    query, key, value, out, sums, cu_seqlens, sinks = ctx.saved_tensors
    *grads, of_sinks = _backward(grad, query, key, value, out, sums, cu_seqlens, ctx.max_seqlen, sinks, *ctx.rule)
    return *grads, None, None, None if sinks is None else of_sinks, None, None


_RULE = "Tensor cu_seqlens, SymInt max_seqlen, Tensor? sinks, float scale, int? window"
_attention = operators.define(
    f"packed_attention(Tensor query, Tensor key, Tensor value, {_RULE}) -> (Tensor, Tensor)",
    {"CPU": _on_cpu, "CUDA": _on_cuda},
    _outputs,
)
_backward = operators.define(
    "packed_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor sums, "
    f"{_RULE}) -> (Tensor, Tensor, Tensor, Tensor)",
    {"CPU": _back_on_cpu, "CUDA": _back_on_cuda},
    _gradients,
)
torch.library.register_autograd("mrl::packed_attention", _differentiate, setup_context=_keep, lib=operators.LIBRARY)
