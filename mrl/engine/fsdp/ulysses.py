"""Ulysses sequence parallelism: ranks of a group share each sequence, and trade heads for tokens around attention.

Dimensions: `C` ranks of the group, `R` rows, `L` places of a row, `H` query heads, `G` key/value heads, `D` head size.

Rank `c` has places `c * L/C` to `(c + 1) * L/C` of every row. All that a model does with one token at a time it does
with these. Attention needs whole rows: one all-to-all gives each rank all places of `H/C` of the heads, a second one
takes the result back. So attention itself knows nothing of ranks, and windows and borders of documents are as on one of
them (S. A. Jacobs et al., "DeepSpeed Ulysses", 2023, arXiv 2309.14509).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Ulysses:
    """The ranks that share this rank's sequences."""

    group: dist.ProcessGroup | None = None  # None where it has them alone

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    def padded(self, length: int) -> int:
        """Returns the places of a row of `length` tokens: the next multiple of the ranks, at least one for each."""
        return max(1, -(-length // self.size)) * self.size

    def own(self, rows: Tensor) -> Tensor:
        """Returns this rank's places [..., L/C] of token-aligned rows [..., L]."""
        return rows if self.group is None else rows.chunk(self.size, dim=-1)[self.group.rank()]

    def whole(self, outputs: Tensor) -> Tensor:
        """Gathers [R, L/C, ..] of each rank to [R, L, ..], the same on all of them.

        Every rank then computes the whole loss. The backward pass hands each the gradient of its own places alone. Over
        the group they add up to the gradient of one loss.
        """
        return outputs if self.group is None else _Gather.apply(outputs, self.group)

    def own_heads(self, values: Tensor) -> Tensor:
        """Returns the values [H/C] of this rank's heads inside attention, from those of all query heads [H]."""
        return values if self.group is None else values.chunk(self.size)[self.group.rank()]

    def attend(self, attention: Callable[..., Tensor], query: Tensor, *keys_and_values: Tensor) -> Tensor:
        """Returns `attention(query, key, value)` over whole rows: [R, heads, L/C, D] each -> [R, L/C, H, D].

        attention: [R, heads, L, D] each -> [R, L, heads, D]; it sees H/C of the query heads. If C does not divide G,
        key and value heads are repeated until it does. They stay with their queries, because lcm(G, C) divides H.
        """
        if self.group is None:
            return attention(query, *keys_and_values)
        assert query.shape[1] % self.size == 0, f"{query.shape[1]} heads on {self.size} ranks"
        of_heads = [query]
        for t in keys_and_values:
            times = math.lcm(t.shape[1], self.size) // t.shape[1]
            of_heads.append(t.repeat_interleave(times, dim=1) if times > 1 else t)
        # [R, heads, L/C, D] -> [C of heads, R, heads/C, L/C, D], sent at once -> [R, heads/C, L, D]
        parts = [t.unflatten(1, (self.size, -1)).movedim(1, 0) for t in of_heads]
        sent = torch.cat([part.flatten(1) for part in parts], dim=1)
        received = _AllToAll.apply(sent, self.group).split([part[0].numel() for part in parts], dim=1)
        pairs = zip(received, parts, strict=True)
        out = attention(*(got.view(part.shape).movedim(0, 2).flatten(2, 3) for got, part in pairs))
        # [R, L, H/C, D] -> [C of places, R, L/C, H/C, D] -> [C of heads, R, L/C, H/C, D]
        out = _AllToAll.apply(out.unflatten(1, (self.size, -1)).movedim(1, 0).contiguous(), self.group)
        return out.movedim(0, 2).flatten(2, 3)


NO_CONTEXT_PARALLEL = Ulysses()


class _AllToAll(torch.autograd.Function):
    """Swaps row `i` of rank `j` with row `j` of rank `i`. The exchange is its own transpose, so its own backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grad.contiguous(), ctx.group), None


class _Gather(torch.autograd.Function):
    """Gathers [R, L/C, ..] of each rank to [R, L, ..]. Backward, each rank takes its own part of the same gradient."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        # c10d takes contiguous tensors alone, and `empty_like` would keep the strides of a transposed one
        parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, own.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.group.size(), dim=1)[ctx.group.rank()], None
