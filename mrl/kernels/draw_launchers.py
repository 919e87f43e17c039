"""Has the Triton kernel of `mrl.kernels.draw`, and the function that launches it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

BLOCK = 2048  # columns that a program holds at a time
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
    block = min(triton.next_power_of_2(max(columns, 1)), BLOCK)
    if rows:
        _draw_kernel[(rows,)](
            z, out, keys, random, temperature, bound, rows, z.stride(0), columns, start, NOISE=keys is not None,
            RANDOM=random is not None, TEMPERATURE=temperature is not None, BOUND=bound is not None, B=block,
            num_warps=8,
        )  # fmt: skip
