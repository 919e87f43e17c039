"""Bytes and operators that attention of local layers and of fsdp takes on a GPU, of CUDA tensors without memory."""

from __future__ import annotations

import collections
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


class _Attention(TorchDispatchMode):
    """Counts operators of attention by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attention" in func._overloadpacket.__name__:
            self.counts[func._overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def operators(
    lengths: Sequence[int], backend: str, *, window: int | None = None, sinks: bool = False, size: int = 128,
    value_size: int = 128, dtype: str = "bfloat16",
) -> dict[str, int]:  # fmt: skip
    """Operators of attention in a forward and backward pass of packed sequences in one layer."""
    import torch.distributed as dist
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mrl.engine.fsdp.attention import DocumentMask, document_attention
    from mrl.mcore_models.attention import PackedLayout, SdpaAttention
    from mrl.ops.packed import Documents

    fake.join_world(0, 1)
    heads, groups, params_dtype = 8, 2, getattr(torch, dtype)
    with fake.Fake() as run, _Attention() as found:
        q, k, v = (
            torch.empty(sum(lengths), 1, n, d, dtype=params_dtype, device="cuda", requires_grad=True)
            for n, d in ((heads, size), (groups, size), (groups, value_size))
        )
        of_sinks = torch.empty(heads, dtype=params_dtype, device="cuda", requires_grad=True) if sinks else None
        if backend == "fsdp":
            documents = Documents.of(lengths, q.device)
            rows = (t.permute(1, 2, 0, 3) for t in (q, k, v))
            out, _ = document_attention(
                torch.nn.Module(), *rows, DocumentMask(window), s_aux=of_sinks, documents=documents
            )
        else:
            config = TransformerConfig(
                num_layers=1, hidden_size=heads * size, num_attention_heads=heads, num_query_groups=groups,
                attention_dropout=0.0, window_size=None if window is None else (window - 1, 0),
                softmax_type="learnable" if sinks else "vanilla", params_dtype=params_dtype,
            )  # fmt: skip
            process_groups: Any = types.SimpleNamespace(cp=dist.group.WORLD, tp=None)
            module = SdpaAttention(config, 1, pg_collection=process_groups)
            positions = torch.arange(sum(lengths), device="cuda")
            layout = PackedLayout.for_sequences(lengths, positions=positions)
            run.syncs.clear()
            out = module(q, k, v, packed_seq_params=layout)
        out.sum().backward()
        assert all(t.grad.shape == t.shape for t in (q, k, v)) and not run.syncs, run.syncs
    return dict(found.counts)
