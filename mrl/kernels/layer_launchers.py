"""Has the Triton kernels of `mrl.kernels.layers`, and the functions that launch them.

Kernels compute in fp32. Sizes of a model are compiled in; numbers of rows are not, because they change all the time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # numbers that a program of a norm holds at a time, at least one row
COLUMNS = 2048  # of SwiGLU that a program takes at a time
PROGRAMS = 512  # of a norm's backward pass: each sums the weight's gradient over its rows


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """Returns x [.., N] as rows, copied if they are not equally far apart, and their distance."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    return rows, rows.stride(0)


def _blocks(size: int, most: int) -> dict[str, int]:
    """Returns the columns B of a program, a power of 2, its rows R, together `most` numbers, and its warps."""
    columns = triton.next_power_of_2(size)
    rows = max(1, most // columns)
    return {"R": rows, "B": columns, "num_warps": min(max(rows * columns // 512, 1), 16)}


# -- RMSNorm -----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    x: tl.tensor, weight: tl.tensor, out: tl.tensor, rows: tl.tensor, step: tl.tensor, inner_step: tl.tensor,
    EPS: tl.constexpr, CENTERED: tl.constexpr, K: tl.constexpr, N: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
) -> None:  # fmt: skip
    row, column = (tl.program_id(0).to(tl.int64) * R + tl.arange(0, R))[:, None], tl.arange(0, B)[None, :]
    mask = (row < rows) & (column < N)
    dtype = out.dtype.element_ty
    numbers = tl.load(x + row // K * step + row % K * inner_step + column, mask=mask, other=0.0).to(tl.float32)
    own = weight + column if K == 1 else weight + row % K * N + column
    factor = tl.load(own, mask=column < N, other=0.0).to(tl.float32)
    unit = numbers * tl.rsqrt(tl.sum(numbers * numbers, 1) / N + EPS)[:, None]
    result = unit * (1 + factor) if CENTERED else unit.to(weight.dtype.element_ty).to(tl.float32) * factor
    tl.store(out + row * N + column, result.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["rows", "blocks"])
def _norm_backward_kernel(
    grad: tl.tensor, x: tl.tensor, weight: tl.tensor, grad_x: tl.tensor, sums: tl.tensor, rows: tl.tensor,
    blocks: tl.tensor, grad_step: tl.tensor, step: tl.tensor,
    EPS: tl.constexpr, CENTERED: tl.constexpr, N: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
) -> None:  # fmt: skip
    program, column = tl.program_id(0).to(tl.int64), tl.arange(0, B)[None, :]
    dtype = grad_x.dtype.element_ty
    factor = tl.load(weight + column, mask=column < N, other=0.0).to(tl.float32)
    factor = 1 + factor if CENTERED else factor
    summed = tl.zeros([R, B], dtype=tl.float32)
    for block in range(blocks):
        row = ((program * blocks + block) * R + tl.arange(0, R))[:, None]
        mask = (row < rows) & (column < N)
        numbers = tl.load(x + row * step + column, mask=mask, other=0.0).to(tl.float32)
        upper = tl.load(grad + row * grad_step + column, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(numbers * numbers, 1) / N + EPS)[:, None]
        unit = numbers * rstd
        summed += upper * (unit if CENTERED else unit.to(dtype).to(tl.float32))
        upper *= factor
        result = (upper - unit * (tl.sum(upper * unit, 1) / N)[:, None]) * rstd
        tl.store(grad_x + row * N + column, result.to(dtype), mask=mask)
    tl.store(sums + program * N + tl.arange(0, B), tl.sum(summed, 0), mask=tl.arange(0, B) < N)


@triton.jit(do_not_specialize=["programs"])
def _sum_kernel(
    sums: tl.tensor, out: tl.tensor, programs: tl.tensor,
    ADDS: tl.constexpr, N: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
) -> None:  # fmt: skip
    column = tl.program_id(0) * B + tl.arange(0, B)
    total = tl.zeros([R, B], dtype=tl.float32)
    for start in range(0, programs, R):
        row = (start + tl.arange(0, R))[:, None]
        mask = (row < programs) & (column < N)[None, :]
        total += tl.load(sums + row * N + column[None, :], mask=mask, other=0.0)
    result = tl.sum(total, 0)
    if ADDS:
        result += tl.load(out + column, mask=column < N, other=0.0).to(tl.float32)
    tl.store(out + column, result.to(out.dtype.element_ty), mask=column < N)


def rms_norm(x: Tensor, weight: Tensor, eps: float, centered: bool, out: Tensor) -> None:
    size, kinds = x.shape[-1], 1 if weight.dim() == 1 else len(weight)
    x = x.reshape(-1, kinds, size)
    x = x if x.stride(2) == 1 else x.contiguous()
    rows, blocks = x.shape[0] * kinds, _blocks(size, BLOCK)
    if rows:
        grid = (triton.cdiv(rows, blocks["R"]),)
        _norm_kernel[grid](x, weight, out, rows, *x.stride()[:2], EPS=eps, CENTERED=centered, K=kinds, N=size, **blocks)


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, centered: bool, main_grad: Tensor | None,
    grad_x: Tensor, grad_weight: Tensor,
) -> None:  # fmt: skip
    (grad, grad_step), (x, step) = _rows(grad), _rows(x)
    rows, size = x.shape
    blocks = _blocks(size, BLOCK)
    each = max(1, triton.cdiv(rows, blocks["R"] * PROGRAMS))
    programs = triton.cdiv(rows, blocks["R"] * each)
    sums = torch.empty(programs, size, dtype=torch.float32, device=x.device)
    if rows:
        _norm_backward_kernel[(programs,)](
            grad, x, weight, grad_x, sums, rows, each, grad_step, step, EPS=eps, CENTERED=centered, N=size, **blocks
        )
    adds, out = main_grad is not None, grad_weight if main_grad is None else main_grad
    _sum_kernel[(triton.cdiv(size, 32),)](sums, out, programs, ADDS=adds, N=size, R=64, B=32)


# -- rotary embedding --------------------------------------------------------------------------------------------------


@triton.jit
def _turn(
    x: tl.tensor, out: tl.tensor, head_step: tl.tensor, cos: tl.tensor, sin: tl.tensor, partner: tl.tensor,
    turned: tl.tensor,
    ROUNDED: tl.constexpr, H: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, B: tl.constexpr,
) -> None:  # fmt: skip
    head, channel = tl.arange(0, HEADS)[:, None], tl.arange(0, B)[None, :]
    mask = (head < H) & (channel < D)
    here = tl.load(x + head * head_step + channel, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(x + head * head_step + partner, mask=mask & turned, other=0.0).to(tl.float32)
    # each product is rounded, as torch's are
    result = (here * cos).to(ROUNDED).to(tl.float32) + (other * sin).to(ROUNDED).to(tl.float32)
    tl.store(out + head * D + channel, result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["angles"])
def _rotary_kernel(
    q: tl.tensor, k: tl.tensor, cos: tl.tensor, sin: tl.tensor, out_q: tl.tensor, out_k: tl.tensor, angles: tl.tensor,
    q_step: tl.tensor, q_head: tl.tensor, k_step: tl.tensor, k_head: tl.tensor,
    HQ: tl.constexpr, BQ: tl.constexpr, HK: tl.constexpr, BK: tl.constexpr, D: tl.constexpr, B: tl.constexpr,
    TURNED: tl.constexpr, BACK: tl.constexpr,
) -> None:  # fmt: skip
    token, channel = tl.program_id(0).to(tl.int64), tl.arange(0, B)[None, :]
    turned, low = channel < TURNED, channel < TURNED // 2
    partner = tl.where(low, channel + TURNED // 2, channel - TURNED // 2)
    at = token % angles * TURNED
    cos_here = tl.load(cos + at + channel, mask=turned, other=1.0).to(tl.float32)
    # a gradient comes back through the sine of the partner, with the other sign
    sines = tl.load(sin + at + (partner if BACK else channel), mask=turned, other=0.0).to(tl.float32)
    sines = tl.where(low, sines, -sines) if BACK else tl.where(low, -sines, sines)
    rounded = cos.dtype.element_ty
    _turn(q + token * q_step, out_q + token * HQ * D, q_head, cos_here, sines, partner, turned, rounded, HQ, BQ, D, B)
    _turn(k + token * k_step, out_k + token * HK * D, k_head, cos_here, sines, partner, turned, rounded, HK, BK, D, B)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool, out_q: Tensor, out_k: Tensor) -> None:
    q, k = (x.reshape(-1, *x.shape[-2:]) for x in (q, k))
    q, k = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k))
    tokens, heads, size = q.shape
    if tokens:
        _rotary_kernel[(tokens,)](
            q, k, cos, sin, out_q, out_k, cos.numel() // cos.shape[-1], *q.stride()[:2], *k.stride()[:2],
            HQ=heads, BQ=triton.next_power_of_2(heads), HK=k.shape[1], BK=triton.next_power_of_2(k.shape[1]),
            D=size, B=triton.next_power_of_2(size), TURNED=cos.shape[-1], BACK=back, num_warps=4,
        )  # fmt: skip


# -- SwiGLU ------------------------------------------------------------------------------------------------------------


@triton.jit
def _swiglu_kernel(
    gate: tl.tensor, up: tl.tensor, weights: tl.tensor, out: tl.tensor, gate_step: tl.tensor, up_step: tl.tensor,
    N: tl.constexpr, R: tl.constexpr, B: tl.constexpr, WEIGHTED: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    dtype = out.dtype.element_ty
    for start in range(0, N, B):
        column = start + tl.arange(0, B)
        mask = column < N
        a = tl.load(gate + row * gate_step + column, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(up + row * up_step + column, mask=mask, other=0.0).to(tl.float32)
        result = (a * tl.sigmoid(a)).to(dtype).to(tl.float32) * b
        if WEIGHTED:
            result = result.to(dtype).to(tl.float32) * tl.load(weights + row)
        tl.store(out + row * N + column, result.to(dtype), mask=mask)


@triton.jit
def _swiglu_backward_kernel(
    grad: tl.tensor, gate: tl.tensor, up: tl.tensor, weights: tl.tensor, grad_gate: tl.tensor, grad_up: tl.tensor,
    grad_weights: tl.tensor,
    grad_step: tl.tensor, gate_step: tl.tensor, up_step: tl.tensor, out_step: tl.tensor,
    N: tl.constexpr, R: tl.constexpr, B: tl.constexpr, WEIGHTED: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    dtype = grad_gate.dtype.element_ty
    total = tl.zeros([B], dtype=tl.float32)
    for start in range(0, N, B):
        column = start + tl.arange(0, B)
        mask = column < N
        upper = tl.load(grad + row * grad_step + column, mask=mask, other=0.0).to(tl.float32)
        a = tl.load(gate + row * gate_step + column, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(up + row * up_step + column, mask=mask, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(a)
        silu = (a * sigmoid).to(dtype).to(tl.float32)
        if WEIGHTED:
            total += (silu * b).to(dtype).to(tl.float32) * upper
            upper *= tl.load(weights + row)
        tl.store(
            grad_gate + row * out_step + column, (upper * b * sigmoid * (1 + a * (1 - sigmoid))).to(dtype), mask=mask
        )
        tl.store(grad_up + row * out_step + column, (upper * silu).to(dtype), mask=mask)
    if WEIGHTED:
        tl.store(grad_weights + row, tl.sum(total, 0))


def swiglu(gate: Tensor, up: Tensor, weights: Tensor | None, out: Tensor) -> None:
    (gate, gate_step), (up, up_step) = _rows(gate), _rows(up)
    rows, size = gate.shape
    blocks = _blocks(min(size, COLUMNS), 1)
    if rows:
        _swiglu_kernel[(rows,)](
            gate, up, weights, out, gate_step, up_step, N=size, WEIGHTED=weights is not None, **blocks
        )


def swiglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, weights: Tensor | None, joint: bool, both: Tensor, grad_weights: Tensor
) -> None:
    of_gate, of_up = both.chunk(2, dim=-1) if joint else both.unbind()
    (grad, grad_step), (gate, gate_step), (up, up_step) = _rows(grad), _rows(gate), _rows(up)
    rows, size = gate.shape
    blocks = _blocks(min(size, COLUMNS), 1)
    if rows:
        _swiglu_backward_kernel[(rows,)](
            grad, gate, up, weights, of_gate, of_up, grad_weights, grad_step, gate_step, up_step,
            2 * size if joint else size, N=size, WEIGHTED=weights is not None, **blocks,
        )  # fmt: skip
