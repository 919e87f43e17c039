"""Computes causal attention in memory that grows with the length, not with its square. It serves cases without a kernel
in torch's own call: fewer queries than keys (context parallelism), sliding windows, and sinks.

Dimensions: `N` sequences of one length, `H` query heads and `G` key-value heads, `Q` queries and `K` keys, `D` head
size of queries and keys, `V` of values. Queries stand at the end: query `i` is at position `K - Q + i` of the keys.

A flash kernel also returns the logarithm of each query's sum of exponentials. Two such pairs over different keys make
the pair over both, and a sink adds its exponential to the sum. The kernel's backward pass takes the final pair and
gives each part its gradients (as ring attention does, arXiv 2310.01889).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mrl.ops.masked import causal_mask

BLOCK = 128
"""Most queries that are masked together if a kernel has no window: the mask is a block's queries times its keys.
Forward and backward of 4,096 tokens with a window of 128 take 150 ms of a CPU core, and 330 ms in blocks of 512. That
is with 8 query heads and 2 key-value heads of 64, torch 2.13. Blocks of 64 save another 10 %, and would be twice as
many calls."""

SHORT_TOKENS = 256
"""Most keys that fewer queries meet in masked blocks without a window. On a CPU these take less time than two calls and
their sum if keys are few: 0.7 to 0.8 of it with 128 keys, 0.8 to 1.2 with 256, 1.1 to 1.3 with 1,024."""

MAX_HEAD_DIM = 256  # of flash kernels on CUDA


@dataclasses.dataclass(frozen=True)
class KeyRange:
    """Holds the queries and keys of one call of a kernel."""

    queries: slice
    keys: slice
    causal: bool = False  # as many queries as keys, each sees those up to its own
    masked: bool = False  # by `causal_mask`, aligned to the end of the keys


def key_ranges(queries: int, keys: int, window: int | None) -> list[KeyRange]:
    """Returns the ranges of queries and keys that `attend` computes.

    Windows go in blocks, with the keys that some query of the block sees.
    """
    before = keys - queries
    if window is None and not (before > 0 and keys <= SHORT_TOKENS):
        own = KeyRange(slice(0, queries), slice(before, keys), causal=True)
        return [own] if before == 0 else [KeyRange(slice(0, queries), slice(0, before)), own]
    return [KeyRange(rows, seen, masked=True) for rows, seen in blocks(queries, keys, window)]


def blocks(queries: int, keys: int, window: int | None, most: int = BLOCK) -> list[tuple[slice, slice]]:
    """Returns blocks of `most` queries, and the keys that some query of the block sees."""
    found = []
    for first in range(0, queries, most):
        last = min(first + most, queries)
        seen = keys - queries + last
        start = 0 if window is None else max(0, keys - queries + first - window + 1)
        found.append((slice(first, last), slice(start, seen)))
    return found


def has_kernel(query: Tensor, value: Tensor) -> bool:
    """Returns whether `attend` serves tensors like these: on a CPU all, on CUDA 16-bit ones that are not too wide."""
    if query.is_cpu:
        return True
    return query.dtype in (torch.bfloat16, torch.float16) and max(query.shape[-1], value.shape[-1]) <= MAX_HEAD_DIM


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Returns attention [N, H, Q, V] of query [N, H, Q, D], key [N, G, K, D] and value [N, G, K, V].

    window: how many keys a query sees, fewer than K; None for all. sinks: [H], scores of a place without a value (arXiv
    2309.17453).
    """
    size, values = query.shape[-1], value.shape[-1]
    # kernels take one head size, on CUDA a multiple of 8; zeros change neither scores nor the values that remain
    width = max(size, values) if query.is_cpu else -(-max(size, values) // 8) * 8
    query, key, value = (t if t.shape[-1] == width else F.pad(t, (0, width - t.shape[-1])) for t in (query, key, value))
    out = _Attention.apply(query, key, value, sinks, scale, window)
    return out if values == width else out[..., :values]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, scale: float, window: int | None
    ) -> Tensor:
        run = on_cpu if query.is_cpu else _on_cuda
        out, sums, state = run(query, key, value, scale, window)
        if sinks is not None:
            sums = add_sinks(out, sums, sinks)
        ctx.scale, ctx.window = scale, window
        ctx.save_for_backward(query, key, value, out, sums, sinks, *state)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, sums, sinks, *state = ctx.saved_tensors
        run = back_on_cpu if query.is_cpu else _back_on_cuda
        grads = run(grad, query, key, value, out, sums, state, ctx.scale, ctx.window)
        of_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            of_sinks = sinks_gradient(grad, out, sums, sinks)
        return *grads, of_sinks, None, None


def add_sinks(out: Tensor, sums: Tensor, sinks: Tensor) -> Tensor:
    """Changes attention [N, H, Q, V] in place to that with sinks [H]. Returns the sums [N, H, Q] with them."""
    with_sinks = torch.logaddexp(sums, sinks.to(sums.dtype).view(1, -1, 1))
    out *= torch.exp(sums - with_sinks)[..., None]
    return with_sinks


def sinks_gradient(grad: Tensor, out: Tensor, sums: Tensor, sinks: Tensor) -> Tensor:
    """Returns the softmax's own derivative, with a value of zero: -p_sink * (grad . out)."""
    share = torch.exp(sinks.to(sums.dtype).view(1, -1, 1) - sums)
    return -(share * (grad.to(sums.dtype) * out).sum(-1)).sum((0, 2)).to(sinks.dtype)


def on_cpu(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> tuple[Tensor, Tensor, list]:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    all_parts, mask = key_ranges(query.shape[2], key.shape[2], window), _masks(window, query.dtype)
    outs, all_sums = [], []
    for part in all_parts:
        q, k, v = _rows(query, part.queries), _rows(key, part.keys), _rows(value, part.keys)
        out, sums = kernel(q, k, v, 0.0, part.causal, attn_mask=mask(part), scale=scale)
        outs.append(out)
        all_sums.append(sums)
    if len(all_parts) == 1:
        return outs[0], all_sums[0], []
    if all_parts[0].masked:  # parts of different queries
        return torch.cat(outs, dim=2), torch.cat(all_sums, dim=2), []
    sums = torch.logaddexp(*all_sums)
    first, second = (torch.exp(one - sums)[..., None] for one in all_sums)
    return (first * outs[0] + second * outs[1]).to(query.dtype), sums, []


def back_on_cpu(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, state: list, scale: float,
    window: int | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    all_parts, mask = key_ranges(query.shape[2], key.shape[2], window), _masks(window, query.dtype)
    totals: list[Tensor] = []
    for part in all_parts:
        q, k, v = _rows(query, part.queries), _rows(key, part.keys), _rows(value, part.keys)
        g, o, s = (_rows(tensor, part.queries) for tensor in (grad, out, sums))
        grads = kernel(g, q, k, v, o, s, 0.0, part.causal, attn_mask=mask(part), scale=scale)
        if len(all_parts) == 1 and k.shape == key.shape:
            return grads
        if not totals:  # sums of several parts, in fp32
            totals = [torch.zeros_like(t, dtype=sums.dtype) for t in (query, key, value)]
        for total, one, where in zip(totals, grads, (part.queries, part.keys, part.keys), strict=True):
            total[:, :, where] += one
    return tuple(total.to(query.dtype) for total in totals)


def _rows(tensor: Tensor, rows: slice) -> Tensor:
    """Returns `tensor[:, :, rows]`, and the tensor itself if that is all of it."""
    return tensor if rows == slice(0, tensor.shape[2]) else tensor[:, :, rows]


def _masks(window: int | None, dtype: torch.dtype) -> Callable[[KeyRange], Tensor | None]:
    """Returns a function that makes parts' additive masks. Blocks of a window share one, except for the first and the
    last."""

    @functools.cache
    def of_size(queries: int, keys: int) -> Tensor:
        seen = causal_mask(queries, keys, window, torch.device("cpu"))
        return torch.zeros(queries, keys, dtype=dtype).masked_fill_(~seen, -torch.inf)

    def of(part: KeyRange) -> Tensor | None:
        if not part.masked:
            return None
        return of_size(part.queries.stop - part.queries.start, part.keys.stop - part.keys.start)

    return of


def causal_and_sides(window: int | None) -> tuple[bool, dict[str, int]]:
    """Returns whether flash-attn is to be causal, and how far it looks to the left and right, as torch's varlen_attn
    says it.

    Its queries stand at the end of the keys since 2.1.
    """
    return window is None, {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0}


def _on_cuda(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
) -> tuple[Tensor, Tensor, list]:
    causal, sides = causal_and_sides(window)
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    out, sums, *state, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale, **sides
    )
    return out.transpose(1, 2), sums, state


def _back_on_cuda(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, state: list, scale: float,
    window: int | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    causal, sides = causal_and_sides(window)
    grad, q, k, v, out = (t.transpose(1, 2) for t in (grad, query, key, value, out))
    grads = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, sums, None, None, q.shape[1], k.shape[1], 0.0, causal, *state, scale=scale, **sides
    )
    return tuple(one.transpose(1, 2) for one in grads)
