"""Reads how megatron's distributed optimizer divides parameters: each bucket of a buffer evenly over data-parallel
ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.nn import Parameter


def ranges_of_ranks(buffer: Any) -> Iterator[tuple[Parameter, dict[int, tuple[int, int]]]]:
    """Yields the parameters of one of megatron's buffers, each with the entries that ranks update.

    The entries are by rank: the first, and the one past the last. A rank without any is left out.
    """
    ranks = buffer.data_parallel_group.size()
    for bucket in buffer.buckets:
        share = bucket.grad_data.numel() // ranks
        for parameter in bucket.params_list:
            first, last, *_ = buffer.param_index_map[parameter]
            first, last = first - bucket.offset, last - bucket.offset
            yield (
                parameter,
                {
                    rank: (max(first, rank * share) - first, min(last, (rank + 1) * share) - first)
                    for rank in range(first // share, -(-last // share))
                },
            )
