"""Bytes and operators that attention of local layers and of fsdp takes on a GPU, of CUDA tensors without memory."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch

from tests.cuda import fake

HEADS, GROUPS = 8, 2


def _module(*, cp: int, window: int | None, sinks: bool, dtype: torch.dtype, size: int = 128) -> Any:
    import torch.distributed as dist
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mrl.mcore_models.attention import SdpaAttention

    config = TransformerConfig(
        num_layers=1, hidden_size=HEADS * size, num_attention_heads=HEADS, num_query_groups=GROUPS,
        attention_dropout=0.0, window_size=None if window is None else (window - 1, 0),
        softmax_type="learnable" if sinks else "vanilla", params_dtype=dtype, context_parallel_size=cp,
    )  # fmt: skip
    process_groups: Any = types.SimpleNamespace(cp=dist.group.WORLD, tp=None)
    return SdpaAttention(config, 1, pg_collection=process_groups)


def _given(tokens: int, size: int, value_size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [
        torch.empty(tokens, 1, n, d, dtype=dtype, device="cuda", requires_grad=True)
        for n, d in ((HEADS, size), (GROUPS, size), (GROUPS, value_size))
    ]


def peak(
    length: int, *, cp: int = 1, window: int | None = None, sinks: bool = False, value_size: int = 128,
    dtype: str = "bfloat16",
) -> int:  # fmt: skip
    """The most bytes that are alive at once in a forward and backward pass of one sequence, on one of cp ranks."""
    from mrl.mcore_models.attention import PackedLayout, zigzag_inverse

    # the last rank has no first segment, which has as many queries as keys: torch's call chooses its kernel on the GPU
    fake.join_world(cp - 1, cp)
    with fake.Fake() as run:
        of = getattr(torch, dtype)
        module = _module(cp=cp, window=window, sinks=sinks, dtype=of)
        order = zigzag_inverse((length,), cp).to("cuda")
        layout = PackedLayout.for_sequences((length,), positions=torch.arange(length, device="cuda"), order=order)
        run.syncs.clear()
        given = _given(length // cp, 128, value_size, of)
        out = module(*given, packed_seq_params=layout)
        assert out.shape == (length // cp, 1, HEADS * value_size) and out.device.type == "cuda"
        out.sum().backward()
        for tensor in (*given, *module.parameters()):
            assert tensor.grad.shape == tensor.shape and tensor.grad.dtype == of
        assert not run.syncs, run.syncs
    return run.memory.peak


def operators(
    lengths: Sequence[int], backend: str, *, window: int | None = None, sinks: bool = False, size: int = 128,
    value_size: int = 128, dtype: str = "bfloat16",
) -> dict[str, int]:  # fmt: skip
    """Operators of attention in a forward and backward pass of packed sequences in one layer."""
    from mrl.engine.fsdp.attention import DocumentMask, document_attention
    from mrl.mcore_models.attention import PackedLayout
    from mrl.ops.packed import Documents

    fake.join_world(0, 1)
    with fake.Fake() as run:
        of = getattr(torch, dtype)
        given = _given(sum(lengths), size, value_size, of)
        if backend == "fsdp":
            documents = Documents.of(lengths, given[0].device)
            of_sinks = torch.empty(HEADS, dtype=of, device="cuda", requires_grad=True) if sinks else None
            rows = (t.permute(1, 2, 0, 3) for t in given)
            out, _ = document_attention(
                torch.nn.Module(), *rows, DocumentMask(window), s_aux=of_sinks, documents=documents
            )
        else:
            module = _module(cp=1, window=window, sinks=sinks, dtype=of, size=size)
            layout = PackedLayout.for_sequences(lengths, positions=torch.arange(sum(lengths), device="cuda"))
            run.syncs.clear()
            out = module(*given, packed_seq_params=layout)
        out.sum().backward()
        assert all(t.grad.shape == t.shape for t in given) and not run.syncs, run.syncs
    return {name: n for name, n in run.order.calls.items() if "attention" in name}
