"""Has the Triton kernels of `mrl.kernels.routes`, and the functions that launch them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 8192  # entries of the routing map that a program holds
COLUMNS = 2048  # of a row that a program holds


@triton.jit(do_not_specialize=["tokens"])
def _count_kernel(
    routing_map: tl.tensor, counts: tl.tensor, tokens: tl.tensor, E: tl.constexpr, R: tl.constexpr, B: tl.constexpr
) -> None:
    block = tl.program_id(0)
    token, expert = (block.to(tl.int64) * R + tl.arange(0, R))[:, None], tl.arange(0, B)
    mask = (token < tokens) & (expert < E)[None, :]
    goes = tl.load(routing_map + token * E + expert[None, :], mask=mask, other=0).to(tl.int32)
    tl.store(counts + block * E + expert, tl.sum(goes, 0), mask=expert < E)


@triton.jit(do_not_specialize=["tokens", "blocks"])
def _route_kernel(
    routing_map: tl.tensor, counts: tl.tensor, rows: tl.tensor, choices: tl.tensor, places: tl.tensor,
    tokens: tl.tensor, blocks: tl.tensor,
    E: tl.constexpr, K: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
) -> None:  # fmt: skip
    block = tl.program_id(0)
    token, expert = (block.to(tl.int64) * R + tl.arange(0, R))[:, None], tl.arange(0, B)
    mask = (token < tokens) & (expert < E)[None, :]
    goes = tl.load(routing_map + token * E + expert[None, :], mask=mask, other=0).to(tl.int32)
    total, before = tl.zeros([B], dtype=tl.int32), tl.zeros([B], dtype=tl.int32)
    for start in range(0, blocks, R):
        other = (start + tl.arange(0, R))[:, None]
        found = tl.load(counts + other * E + expert[None, :], mask=(other < blocks) & (expert < E)[None, :], other=0)
        total += tl.sum(found, 0)
        before += tl.sum(tl.where(other < block, found, 0), 0)
    row = (tl.cumsum(total, 0) - total + before)[None, :] + tl.cumsum(goes, 0) - goes
    choice = token * K + tl.cumsum(goes, 1) - goes
    tl.store(rows + choice, row.to(tl.int64), mask=goes > 0)
    tl.store(choices + row, choice, mask=goes > 0)
    tl.store(places + row, token * E + expert[None, :], mask=goes > 0)


@triton.jit
def _copy_rows_kernel(
    x: tl.tensor, choices: tl.tensor, out: tl.tensor, N: tl.constexpr, K: tl.constexpr, B: tl.constexpr
) -> None:
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    token = tl.load(choices + row) // K
    tl.store(out + row * N + column, tl.load(x + token * N + column, mask=column < N), mask=column < N)


@triton.jit
def _sum_rows_kernel(
    y: tl.tensor, rows: tl.tensor, out: tl.tensor, N: tl.constexpr, K: tl.constexpr, B: tl.constexpr
) -> None:
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    total = tl.zeros([B], dtype=tl.float32)
    for k in range(K):
        row = tl.load(rows + token * K + k)
        total += tl.load(y + row * N + column, mask=column < N, other=0.0).to(tl.float32)
    tl.store(out + token * N + column, total.to(out.dtype.element_ty), mask=column < N)


def find_routes(routing_map: Tensor, chosen: int, rows: Tensor, choices: Tensor, places: Tensor) -> None:
    routing_map = routing_map.contiguous()
    tokens, experts = routing_map.shape
    columns = triton.next_power_of_2(experts)
    sizes = {"E": experts, "R": max(16, TILE // columns), "B": columns, "num_warps": 8}
    blocks = triton.cdiv(tokens, sizes["R"])
    counts = torch.empty(blocks, experts, dtype=torch.int32, device=rows.device)
    if tokens:
        _count_kernel[(blocks,)](routing_map, counts, tokens, **sizes)
        _route_kernel[(blocks,)](routing_map, counts, rows, choices, places, tokens, blocks, K=chosen, **sizes)


def copy_rows(x: Tensor, choices: Tensor, chosen: int, out: Tensor) -> None:
    if out.numel():
        grid, sizes = _grid_of_rows(out)
        _copy_rows_kernel[grid](x.contiguous(), choices, out, K=chosen, **sizes)


def sum_rows(y: Tensor, rows: Tensor, out: Tensor) -> None:
    if out.numel():
        grid, sizes = _grid_of_rows(out)
        _sum_rows_kernel[grid](y.contiguous(), rows.contiguous(), out, K=rows.shape[1], **sizes)


def _grid_of_rows(out: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    rows, size = out.shape
    columns = min(triton.next_power_of_2(size), COLUMNS)
    return (rows, triton.cdiv(size, columns)), {"N": size, "B": columns}
