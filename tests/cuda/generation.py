"""Bytes that the attention of generation takes on a GPU for the tokens of a prompt, of CUDA tensors without memory."""

from __future__ import annotations

import torch

from tests.cuda import fake

HEADS, GROUPS, SIZE = 32, 8, 128


def peak(
    new: int, old: int, *, dtype: str = "bfloat16", window: int | None = None, sinks: bool = False,
    softcap: float | None = None,
) -> int:  # fmt: skip
    """The most bytes alive at once while one layer attends to `new` tokens of a prompt after `old` that the cache has,
    beside the cache."""
    from mrl.ops.kv_cache import CachedStep, KVCache
    from mrl.ops.masked import ScoreRule

    with fake.Fake() as run, torch.no_grad():
        q = torch.empty(new, GROUPS, HEADS // GROUPS, SIZE, dtype=getattr(torch, dtype), device="cuda")
        k, v = (torch.empty(new, GROUPS, SIZE, dtype=q.dtype, device="cuda") for _ in range(2))
        step = CachedStep(KVCache(1, new + old), (new,), (old,), torch.device("cuda"))
        cache = sum(t.numel() * t.element_size() for t in step.cache.of_layer(1, k, v))
        of_sinks = torch.empty(HEADS, dtype=q.dtype, device="cuda") if sinks else None
        out = step.attend(1, q, k, v, ScoreRule(1.0, window, of_sinks, softcap))
        assert out.shape == q.shape and out.dtype == q.dtype and out.device.type == "cuda"
        return run.memory.peak - cache
