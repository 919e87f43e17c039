"""Times a sum over processes: the trial of gloo and NCCL in `mrl doctor --collectives`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

SMALL, SMALL_TIMES = 4, 50
LARGE_REPEATS = 5


def time_all_reduce(device: torch.device, large: int) -> Iterator[tuple[int, float]]:
    """Yields (bytes, median seconds) of an all-reduce of one number and of one with `large` bytes, on joined processes.

    Raises ArithmeticError if a sum is wrong. Collective.
    """
    for size, times in ((SMALL, SMALL_TIMES), (large, LARGE_REPEATS)):
        yield size, statistics.median(_once(device, size) for _ in range(times + 1))


def _once(device: torch.device, size: int) -> float:
    ranks = dist.get_world_size()
    tensor = torch.full((size // 4,), float(dist.get_rank() + 1), device=device)
    dist.barrier()
    begun = time.perf_counter()
    dist.all_reduce(tensor)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    passed = time.perf_counter() - begun
    expected = ranks * (ranks + 1) / 2
    if not bool((tensor == expected).all()):
        raise ArithmeticError(f"the sum of {ranks} ranks is {float(tensor[0])} and not {expected}")
    return passed


def destroy_process_groups() -> None:
    """Destroys the process groups of this process."""
    dist.destroy_process_group()
