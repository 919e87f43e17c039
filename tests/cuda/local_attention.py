"""Bytes that the local spec's attention takes on a GPU, of CUDA tensors without memory."""

from __future__ import annotations

import types
from typing import Any

import torch

from tests.cuda import fake


def peak(
    length: int, *, cp: int = 1, window: int | None = None, sinks: bool = False, value_size: int = 128,
    dtype: str = "bfloat16",
) -> int:  # fmt: skip
    """The most bytes that are alive at once in a forward and backward pass of one sequence, on one of cp ranks."""
    import torch.distributed as dist
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mrl.mcore_models.attention import PackedLayout, SdpaAttention, zigzag_inverse

    # the last rank has no first segment, which has as many queries as keys: torch's call chooses its kernel on the GPU
    fake.join_world(cp - 1, cp)
    heads, groups, size = 8, 2, 128
    params_dtype = getattr(torch, dtype)
    with fake.Fake() as run:
        config = TransformerConfig(
            num_layers=1, hidden_size=heads * size, num_attention_heads=heads, num_query_groups=groups,
            attention_dropout=0.0, window_size=None if window is None else (window - 1, 0),
            softmax_type="learnable" if sinks else "vanilla", params_dtype=params_dtype, context_parallel_size=cp,
        )  # fmt: skip
        process_groups: Any = types.SimpleNamespace(cp=dist.group.WORLD, tp=None)
        module = SdpaAttention(config, 1, pg_collection=process_groups)
        order = zigzag_inverse((length,), cp).to("cuda")
        layout = PackedLayout.for_sequences((length,), positions=torch.arange(length, device="cuda"), order=order)
        run.syncs.clear()
        q, k, v = (
            torch.empty(length // cp, 1, n, d, dtype=params_dtype, device="cuda", requires_grad=True)
            for n, d in ((heads, size), (groups, size), (groups, value_size))
        )
        out = module(q, k, v, packed_seq_params=layout)
        assert out.shape == (length // cp, 1, heads * value_size) and out.device.type == "cuda"
        out.sum().backward()
        for tensor in (q, k, v, *module.parameters()):
            assert tensor.grad.shape == tensor.shape and tensor.grad.dtype == params_dtype
        assert not run.syncs, run.syncs
    return run.memory.peak
