"""Captures CUDA graphs, of decoding steps and of training's layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from mrl.ops import devices


@contextlib.contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Makes a graph of the kernels that are launched inside. Raises RuntimeError if CUDA refuses.

    Other threads (autograd's, a checkpoint's in the background, a server's) may call CUDA meanwhile. A refusal raises
    before `torch.cuda.graph` sets this thread's stream back (torch 2.13, cuda/graphs.py).
    """
    stream = torch.cuda.current_stream() if devices.has_gpu() else None
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
    except BaseException:
        if stream is not None:
            torch.cuda.set_stream(stream)
        raise


def on_any_rank(here: bool, group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Returns whether something is so on any rank of a group; of this one without a group. Collective.

    Ranks of a tensor-parallel group have graphs all or none: all-reduces in one would wait for those of other ranks.
    """
    if group is None or group.size() == 1:
        return here
    anywhere = torch.tensor([int(here)], device=device)
    dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=group)
    return bool(anywhere.item())
