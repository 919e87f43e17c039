"""Computes the gated delta rule (Yang et al., arXiv 2412.06464) over sequences that lie end to end.

    S_t = exp(g_t) S_{t-1};   S_t += k_t (beta_t (v_t - S_t^T k_t))^T;   o_t = S_t^T q_t

Each sequence has a state of its own, so nothing passes from one to the next. A sequence is cut into chunks. The chunks
of all sequences are computed together, and the states go from chunk to chunk for all sequences at once (section 3.3).

Dimensions: `T` tokens of all sequences, `N` sequences, `G` key heads, `R` value heads that share a key head, `K` and
`V` channels of a key and of a value, `C` tokens of a chunk, `M` chunks, `W` weights of the convolution of a channel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mrl.kernels import delta_rule as kernels
from mrl.ops import devices

CHUNK = 64
NORM_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Says where the tokens of sequences stand in their chunks, for all layers of a forward.

    Chunks are in the order of their number in the sequence. Among those of one number, longer sequences come first.
    """

    size: int
    token: Tensor  # [M*C] the token at each place of a chunk, T at a place without one
    place: Tensor  # [T] the place of each token
    active: tuple[int, ...]  # sequences that have a first chunk, a second, ...
    by_length: Tensor  # [N] the sequences, longest first
    positions: Tensor  # [T] index of each token in its sequence
    cu_seqlens: tuple[Tensor, Tensor]  # [N + 1] of the sequences and their end, on the device and on the CPU

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Chunks:
        """Returns the chunks of sequences of these lengths. A sequence of no tokens has no chunk."""
        assert sum(lengths), "no sequence has a token"
        size, total = max(1, min(CHUNK, max(lengths))), sum(lengths)
        lengths_N = np.array(lengths)
        starts_N = lengths_N.cumsum() - lengths_N
        by_length = np.argsort(-lengths_N, kind="stable")
        counts = (lengths_N + size - 1) // size
        active = [int((counts > number).sum()) for number in range(counts.max())]
        sequence = np.concatenate([by_length[:count] for count in active])
        inside = np.repeat(np.arange(len(active)), active)[:, None] * size + np.arange(size)
        token = np.where(inside < lengths_N[sequence, None], starts_N[sequence, None] + inside, total).ravel()
        place = np.empty(total + 1, dtype=np.int64)
        place[token] = np.arange(token.size)
        positions = np.arange(total) - np.repeat(starts_N, lengths_N)
        token, place, by_length, positions = (
            devices.tensor_on(device, values) for values in (token, place[:total], by_length, positions)
        )
        starts = np.append(starts_N, total)
        both = devices.tensor_on(device, starts), torch.from_numpy(starts)
        return cls(size, token, place, tuple(active), by_length, positions, both)


class _Rows(torch.autograd.Function):
    """Returns rows of x [n, ...] at `index`, zeros where it is n. `back` has the place in the result of each row of x.

    No row is there twice, so the gradient is a copy too: no device sums it in an order of its own.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return _rows(x, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _rows(grad, *ctx.saved_tensors), None, None


def _rows(x: Tensor, index: Tensor) -> Tensor:
    if index.numel() > x.shape[0]:
        x = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
    return x[index]


def reorder(x: Tensor, index: Tensor, back: Tensor) -> Tensor:
    """Returns rows of x [n, ...] at `index`, each once. back: the index that undoes it. The gradient is a copy, too."""
    return _Rows.apply(x, index, back)


class CausalConvolution(torch.autograd.Function):
    """Computes y_t = sum_i w_i x_(t-i) in fp32 for each channel, over the tokens of t's own sequence.

    x: [T, D]. weight: [D, W], the last one of a channel for the token itself. positions: [T], of each token in its
    sequence.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, positions)
        out = x.float() * weight[:, -1].float()
        for back in range(1, weight.shape[1]):
            out[back:] += _earlier(x, positions, back) * weight[:, -1 - back].float()
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, positions = ctx.saved_tensors
        grad = grad.float()
        of_x, of_weight = grad * weight[:, -1].float(), [(grad * x).sum(0)]
        for back in range(1, weight.shape[1]):
            inside = grad[back:] * (positions[back:, None] >= back)
            of_x[: len(inside)] += inside * weight[:, -1 - back].float()
            of_weight.append((inside * x[: len(inside)]).sum(0))
        return of_x.to(x.dtype), torch.stack(of_weight[::-1], dim=1).to(weight.dtype), None


def _earlier(x: Tensor, positions: Tensor, back: int) -> Tensor:
    """Returns for each token from number `back` on the one so many places before, zeros where that is of another
    sequence."""
    return x[: max(0, len(x) - back)].float() * (positions[back:, None] >= back)


def unit(x: Tensor) -> Tensor:
    """Returns x [..., K] in fp32 with a norm of one."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def chunked_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, chunks: Chunks, state: Tensor | None = None,
    *, repeatable: bool = False,
) -> tuple[Tensor, Callable[[], Tensor]]:  # fmt: skip
    """Returns outputs [T, G, R, V] and a function that gives the states [N, G, R, K, V] after each sequence, in fp32.

    query, key: [T, G, K] of `unit`. value: [T, G, R, V]. decay: [T, G, R], the logarithm of what a state keeps. beta:
    [T, G, R]. state: before each sequence; zeros without it. repeatable: not by kernels that may round apart in
    another process.
    """
    if kernels.takes(value, repeatable=repeatable):
        out, after = kernels.chunked_rule((query, key, value, decay, beta), chunks.cu_seqlens, state)
        return out, lambda: after
    in_chunks = [
        _Rows.apply(x.float(), chunks.token, chunks.place).unflatten(0, (-1, chunks.size)).movedim(1, -2)
        for x in (query * query.shape[-1] ** -0.5, key, value, decay[..., None], beta[..., None])
    ]
    query, key = (x.unsqueeze(2) for x in in_chunks[:2])  # [M, G, 1, C, K]
    value, decay, beta = in_chunks[2:]  # [M, G, R, C, V] and [M, G, R, C, 1]
    later = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=value.device).triu(1)
    # from the begin of the chunk. In fp32 a head that forgets fast would lose the digits of its differences. A GPU's
    # cumsum has no fixed order
    kept = decay.double().transpose(-1, -2).masked_fill(later, 0).sum(-1, keepdim=True)
    between = (kept - kept.transpose(-1, -2)).float().masked_fill(later, -torch.inf).exp()  # [M, G, R, C, C]
    # the values that a chunk writes, and the keys by which it reads the state before it (eq. 8 to 10 of the paper)
    system = beta * (key @ key.transpose(-1, -2)) * between
    written, read = (
        torch.linalg.solve_triangular(system, x, upper=False, unitriangular=True)
        for x in (beta * value, beta * kept.float().exp() * key)
    )
    seen = (query @ key.transpose(-1, -2)) * between
    rest, kept = (kept[..., -1:, :] - kept).float().exp(), kept.float()
    query, key = query * kept.exp(), key * rest
    kept = kept[..., -1:, :].exp()
    if state is None:
        state = value.new_zeros(len(chunks.by_length), *value.shape[1:3], key.shape[-1], value.shape[-1])
    else:
        state = state.float()[chunks.by_length]
    outs, ended = [], []
    # split, because the gradient of each slice would be as long as all chunks
    parts = zip(*(x.split(chunks.active) for x in (query, key, seen, written, read, kept)), strict=True)
    for count, (q, k, by_place, new, reads, keeps) in zip(chunks.active, parts, strict=True):
        ended.append(state[count:])
        state = state[:count]
        new = new - reads @ state
        outs.append(q @ state + by_place @ new)
        state = state * keeps + k.transpose(-1, -2) @ new
    out = torch.cat(outs).movedim(-2, 1).flatten(0, 1)

    def states() -> Tensor:
        return torch.cat([state, *ended[::-1]])[torch.argsort(chunks.by_length)]

    return _Rows.apply(out, chunks.place, chunks.token), states


def one_token_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns outputs [N, G, R, V] and states of one new token of each sequence; arguments as of `chunked_rule`."""
    query, key = (x.float()[:, :, None, :, None] for x in (query * query.shape[-1] ** -0.5, key))
    state = state * decay.exp()[..., None, None]
    new = beta[..., None] * (value.float() - (state * key).sum(-2))
    state = state + key * new[..., None, :]
    return (state * query).sum(-2), state
