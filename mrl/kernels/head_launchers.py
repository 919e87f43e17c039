"""Has the Triton kernels of `mrl.kernels.head`, and the functions that launch them."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

BLOCK = 4096  # columns that a program holds at a time


@triton.jit
def _logits(
    x: tl.tensor, scale: tl.tensor, softcap: tl.tensor, per_temperature: tl.tensor, SOFTCAP: tl.constexpr
) -> tl.tensor:
    """Returns the logits over the temperature; -inf stays -inf without a softcap."""
    z = x.to(tl.float32) * scale
    if SOFTCAP:
        z = softcap * _tanh(z / softcap)
    return z * per_temperature


@triton.jit
def _tanh(x: tl.tensor) -> tl.tensor:
    e = tl.exp(-2.0 * tl.abs(x))
    return tl.where(x < 0, e - 1.0, 1.0 - e) / (1.0 + e)


@triton.jit(do_not_specialize=["rows", "start"])
def _sums_kernel(
    z: tl.tensor, labels: tl.tensor, out: tl.tensor, rows: tl.tensor, stride: tl.tensor, columns: tl.tensor,
    start: tl.tensor, scale: tl.tensor, softcap: tl.tensor, per_temperature: tl.tensor,
    SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, WHOLE: tl.constexpr,
    K: tl.constexpr, LABELS: tl.constexpr, B: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = z + row * stride
    largest, total = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32)
    weighted = total
    for begin in range(0, columns, B):
        at = begin + tl.arange(0, B)
        x = tl.load(base + at, mask=at < columns, other=0.0)
        block = tl.where(at < columns, _logits(x, scale, softcap, per_temperature, SOFTCAP), float("-inf"))
        new = tl.maximum(largest, tl.max(block, 0))
        finite = tl.where(new == float("-inf"), 0.0, new)  # as long as there is nothing but -inf
        exp = tl.exp(block - finite)
        below = tl.where(largest == float("-inf"), 0.0, largest - finite)
        factor = tl.exp(below)
        if ENTROPY:
            shifted = tl.where(block == float("-inf"), 0.0, block - finite)
            weighted = (weighted + below * total) * factor + tl.sum(exp * shifted, 0)
        total = total * factor + tl.sum(exp, 0)
        largest = new
    k = tl.arange(0, LABELS)
    column = tl.load(labels + row * K + k, mask=k < K, other=-1) - start
    here = (k < K) & (column >= 0) & (column < columns)
    target = _logits(tl.load(base + column, mask=here, other=0.0), scale, softcap, per_temperature, SOFTCAP)
    out += row
    if WHOLE:
        log_total = tl.log(total)
        tl.store(out, largest + log_total)
        tl.store(out + rows, log_total - weighted / total)
        log_probs = tl.where(here, target - largest - log_total, float("nan"))
        tl.store(out + (2 + k) * rows, log_probs, mask=k < K)
    else:
        tl.store(out, largest)
        tl.store(out + rows, total)
        tl.store(out + 2 * rows, weighted)
        tl.store(out + (3 + k) * rows, tl.where(here, target, 0.0), mask=k < K)
        tl.store(out + (3 + K + k) * rows, here.to(tl.float32), mask=k < K)


@triton.jit(do_not_specialize=["start"])
def _gradient_kernel(
    z: tl.tensor, labels: tl.tensor, lse: tl.tensor, grads: tl.tensor, entropy: tl.tensor, entropy_grad: tl.tensor,
    stride: tl.tensor, columns: tl.tensor, start: tl.tensor,
    scale: tl.tensor, softcap: tl.tensor, per_temperature: tl.tensor,
    SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, K: tl.constexpr, LABELS: tl.constexpr, B: tl.constexpr,
) -> None:  # fmt: skip
    row, begin = tl.program_id(0).to(tl.int64), tl.program_id(1) * B
    at = begin + tl.arange(0, B)
    x = tl.load(z + row * stride + at, mask=at < columns, other=0.0)
    log_p = _logits(x, scale, softcap, per_temperature, SOFTCAP) - tl.load(lse + row)
    k = tl.arange(0, LABELS)
    factor = tl.sum(tl.load(grads + row * K + k, mask=k < K, other=0.0), 0) + tl.zeros([B], tl.float32)
    if ENTROPY:  # a column of -inf has no part: its probability is 0
        finite = tl.where(log_p == float("-inf"), 0.0, log_p)
        factor += tl.load(entropy_grad + row) * (finite + tl.load(entropy + row))
    grad = -tl.exp(log_p) * factor
    for label in range(K):
        column = tl.load(labels + row * K + label) - start
        if (column >= begin) & (column < begin + B):
            grad += tl.where(at == column, tl.load(grads + row * K + label), 0.0)
    grad *= per_temperature
    if SOFTCAP:
        e = tl.exp(-2.0 * tl.abs(x.to(tl.float32) * scale / softcap))
        grad *= 4.0 * e / ((1.0 + e) * (1.0 + e))  # 1 - tanh^2, without its cancellation
    tl.store(z + row * stride + at, (grad * scale).to(z.dtype.element_ty), mask=at < columns)


def _options(z: Tensor, labels: Tensor, start: int, rule: list[float]) -> tuple[list[Any], dict[str, Any]]:
    """Returns the arguments that both kernels have after their tensors, and their constants."""
    scale, softcap, temperature = rule
    count, columns = labels.shape[1], z.shape[1]
    block = min(triton.next_power_of_2(max(columns, 1)), BLOCK)
    constants = {
        "SOFTCAP": softcap != 0, "K": count, "LABELS": triton.next_power_of_2(max(count, 1)), "B": block,
        "num_warps": min(max(block // 512, 1), 8),
    }  # fmt: skip
    assert z.stride(1) == 1 or columns <= 1, z.stride()
    return [z.stride(0), columns, start, scale, softcap, 1 / temperature], constants


def head_sums(
    z: Tensor, labels: Tensor, start: int, rule: list[float], entropy: bool, whole: bool, out: Tensor
) -> None:
    given, constants = _options(z, labels, start, rule)
    if rows := z.shape[0]:
        _sums_kernel[(rows,)](z, labels, out, rows, *given, ENTROPY=entropy, WHOLE=whole, **constants)


def head_gradient_(
    z: Tensor, labels: Tensor, lse: Tensor, grads: Tensor, entropy: Tensor | None, entropy_grad: Tensor | None,
    start: int, rule: list[float],
) -> None:  # fmt: skip
    given, constants = _options(z, labels, start, rule)
    if z.numel():
        grid = (z.shape[0], triton.cdiv(z.shape[1], constants["B"]))
        _gradient_kernel[grid](
            z, labels, lse, grads, entropy, entropy_grad, *given, ENTROPY=entropy is not None, **constants
        )


DRAW_BLOCK = 2048  # columns that a program of `draw` holds at a time
# Constants of mrl/engine/splitmix.py (which lies above this package), as signed integers
_GAMMA, _FIRST, _SECOND = (
    tl.constexpr(word - 2**64) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)

# CUDA's own functions, which torch's kernels call, too. The interpreter has none of them.
if triton.knobs.runtime.interpret:

    @triton.jit
    def _log1p(x: tl.tensor) -> tl.tensor:
        return tl.log(x.to(tl.float64) + 1.0).to(tl.float32)

    @triton.jit
    def _log(x: tl.tensor) -> tl.tensor:
        return tl.log(x)
else:
    _log1p, _log = libdevice.log1p, libdevice.log


@triton.jit
def _gumbel(key: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """Returns the noise of vocabulary ids, as `mrl.engine.sampling.gumbel` does."""
    word = key + (ids // 2 + 1).to(tl.int64) * _GAMMA
    word = (word ^ ((word >> 30) & 0x3FFFFFFFF)) * _FIRST
    word = (word ^ ((word >> 27) & 0x1FFFFFFFFF)) * _SECOND
    word = word ^ ((word >> 31) & 0x1FFFFFFFF)
    half = (word >> (32 * (ids % 2)).to(tl.int64)) & 0x7FFFFFFF
    w = tl.minimum((half.to(tl.int32).to(tl.float32) + 0.5) * 2.0**-31, 1 - 2.0**-24)
    return -_log(-_log1p(-w))


@triton.jit(do_not_specialize=["rows", "start"])
def _draw_kernel(
    z: tl.tensor, out: tl.tensor, keys: tl.tensor, random: tl.tensor, temperature: tl.tensor, bound: tl.tensor,
    rows: tl.tensor, stride: tl.tensor, columns: tl.tensor, start: tl.tensor,
    NOISE: tl.constexpr, RANDOM: tl.constexpr, TEMPERATURE: tl.constexpr, BOUND: tl.constexpr, B: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = z + row * stride
    best, largest = tl.full((), float("-inf"), tl.float32), tl.full((), float("-inf"), tl.float32)
    token, total = tl.full((), 0, tl.int32), tl.full((), 0.0, tl.float32)
    for begin in range(0, columns, B):
        at = begin + tl.arange(0, B)
        logit = tl.load(base + at, mask=at < columns, other=float("-inf")).to(tl.float32)
        if TEMPERATURE:
            logit = tl.div_rn(logit, tl.load(temperature + row))
        score = logit
        if NOISE:
            score = logit + _gumbel(tl.load(keys + row), start + at)
            if RANDOM:
                score = tl.where(tl.load(random + row), score, logit)
        if BOUND:
            score = tl.where(logit < tl.load(bound + row), float("-inf"), score)
        top, index = tl.max(score, 0, return_indices=True)
        token = tl.where(top > best, begin + index, token)  # of equal ones the lowest id
        best = tl.maximum(best, top)
        new = tl.maximum(largest, tl.max(logit, 0))
        finite = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(largest - finite) + tl.sum(tl.exp(logit - finite), 0)
        largest = new
    chosen = tl.load(base + token, mask=token < columns, other=float("-inf")).to(tl.float32)
    if TEMPERATURE:
        chosen = tl.div_rn(chosen, tl.load(temperature + row))
    out += row
    tl.store(out, best.to(tl.float64))
    tl.store(out + rows, (start + token).to(tl.float64))
    tl.store(out + 2 * rows, chosen.to(tl.float64))
    tl.store(out + 3 * rows, (largest + tl.log(total)).to(tl.float64))


def draw(
    z: Tensor, start: int, keys: Tensor | None, random: Tensor | None, temperature: Tensor | None,
    bound: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    rows, columns = z.shape
    assert z.stride(1) == 1 or columns <= 1, z.stride()
    block = min(triton.next_power_of_2(max(columns, 1)), DRAW_BLOCK)
    if rows:
        _draw_kernel[(rows,)](
            z, out, keys, random, temperature, bound, rows, z.stride(0), columns, start, NOISE=keys is not None,
            RANDOM=random is not None, TEMPERATURE=temperature is not None, BOUND=bound is not None, B=block,
            num_warps=8,
        )  # fmt: skip
