"""What transformer-engine's attention does not do: which of its kernels serve a model in a layout on a GPU.

transformer-engine chooses at the first forward, and where nothing is left that is a ValueError of a worker. The table
here says it before, from a model's fields, and is compared with transformer-engine's own choice by
tests/cuda/test_backends.py. Sources: `get_attention_backend` and `attn_forward_func_with_cp` of its Python, and
`nvte_get_fused_attn_backend` of its C++, 2.20. Micro-batches are packed ("thd"), without padding between sequences.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Mapping
from typing import Any, Literal

import torch

from mrl.mcore_models.flash import LARGEST_HEAD
from mrl.mcore_models.platform import has_gpu
from mrl.parallel import ParallelDims

Kernel = Literal["flash", "fused", "unfused"]
CpCommunication = Literal["p2p", "a2a", "all_gather"]

GENERATIONS = ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))
"""Compute capabilities of A100, L40S and RTX 4090, H100 and H200, B200, RTX 5090."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU and what is installed for its attention; None for what is not known, which is then assumed to do."""

    capability: tuple[int, int] | None = None  # compute capability, (9, 0) for H100
    flash_attn: tuple[int, ...] | None = None  # version of flash-attn 2; () where it is not installed
    cudnn: tuple[int, int, int] | None = None
    transformer_engine: tuple[int, ...] | None = None

    @classmethod
    def here(cls) -> "Gpu":
        """Returns this process's GPU; of a machine without one nothing is known, as the run may be for another."""
        if not has_gpu():
            return cls()
        number = torch.backends.cudnn.version()  # 92501 is 9.25.1; None where torch has no cuDNN
        return cls(
            torch.cuda.get_device_capability(),
            installed("flash-attn"),
            None if number is None else (number // 10_000, number // 100 % 100, number % 100),
            installed("transformer-engine") or None,
        )


def installed(package: str) -> tuple[int, ...]:
    """Returns the numbers of an installed package's version, () where it is not installed."""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())


@dataclasses.dataclass(frozen=True)
class Attention:
    """What of a model in a layout decides which kernel its attention has."""

    heads: int  # of a tensor-parallel rank
    groups: int  # key-value heads of one
    query_size: int  # of a head's queries and keys
    value_size: int
    windowed: bool  # in some layer
    sinks: bool
    dropout: bool
    cp: int

    @classmethod
    def of(cls, fields: Mapping[str, Any], dims: ParallelDims) -> "Attention":
        """Returns what `fields` say: those of megatron's configuration, as `fields_of` has them."""
        heads = fields["num_attention_heads"]
        query = value = fields.get("kv_channels") or fields["hidden_size"] // heads
        if fields.get("multi_latent_attention"):
            query, value = fields["qk_head_dim"] + fields["qk_pos_emb_head_dim"], fields["v_head_dim"]
        slides = fields.get("window_attn_skip_freq")
        return cls(
            heads=heads // dims.tp,
            groups=max(1, (fields.get("num_query_groups") or heads) // dims.tp),
            query_size=query,
            value_size=value,
            windowed=fields.get("window_size") is not None and (slides is None or any(slides)),
            sinks=fields.get("softmax_type", "vanilla") != "vanilla",
            dropout=bool(fields.get("attention_dropout")),
            cp=dims.cp,
        )

    @property
    def heads_split(self) -> bool:
        """Whether context-parallel ranks can each have whole heads, as transformer-engine's a2a gives them.

        Of odd numbers cuDNN's kernel takes none there, whatever cp is (2.20.2, `get_attention_backend`).
        """
        return not any(n % self.cp or n % 2 for n in (self.heads, self.groups))

    @property
    def cp_communication(self) -> CpCommunication:
        """How context-parallel ranks exchange keys and values: p2p, a ring, is transformer-engine's default.

        It has no windows in a ring, and sinks only where ranks exchange heads (a2a).
        """
        if self.cp == 1 or not (self.windowed or self.sinks):
            return "p2p"
        return "a2a" if self.sinks or self.heads_split else "all_gather"


def cp_comm_type(fields: Mapping[str, Any], dims: ParallelDims) -> CpCommunication:
    """Returns megatron's `cp_comm_type` for a model under transformer-engine."""
    return Attention.of(fields, dims).cp_communication


def te_refuses(
    fields: Mapping[str, Any], dims: ParallelDims, gpu: Gpu | None = None, *, dtype: torch.dtype = torch.bfloat16
) -> str | None:
    """Returns why transformer-engine has no attention for a model in a layout, as the end of a sentence; None where it
    has.

    gpu: by default the one here; where its generation is not known, one that some generation serves is not refused.
    """
    gpu = Gpu.here() if gpu is None else gpu
    attention = Attention.of(fields, dims)
    why = _without_cp_communication(attention, gpu)
    if why is not None:
        return why
    generations = GENERATIONS if gpu.capability is None else (gpu.capability,)
    if any(kernels(attention, dataclasses.replace(gpu, capability=one), dtype) for one in generations):
        return None
    what = _words(attention, dtype)
    if gpu.capability is None:
        return f"has no kernel for {what} on any GPU"
    kind = f"GPUs of compute capability {gpu.capability[0]}.{gpu.capability[1]}"
    if kernels(attention, dataclasses.replace(gpu, flash_attn=None), dtype):
        return f"has no kernel for {what} on {kind} without flash-attn 2"
    return f"has no kernel for {what} on {kind}"


def te_slows(
    fields: Mapping[str, Any], dims: ParallelDims, gpu: Gpu | None = None, *, dtype: torch.dtype = torch.bfloat16
) -> str | None:
    """Returns what to know of a model's attention under transformer-engine where it is the unfused one alone; else
    None."""
    gpu = Gpu.here() if gpu is None else gpu
    attention = Attention.of(fields, dims)
    if gpu.capability is None or kernels(attention, gpu, dtype) != ("unfused",):
        return None
    cures = []
    if "flash" in kernels(attention, dataclasses.replace(gpu, flash_attn=None), dtype):
        cures.append("flash-attn 2")
    if _local_keeps_no_scores(attention, dtype):
        cures.append("engine.layer_spec: local")
    line = "its attention is the unfused one, whose memory grows with the square of a row"
    return f"{line}; it does not under {' or '.join(cures)}" if cures else line


def _local_keeps_no_scores(attention: Attention, dtype: torch.dtype) -> bool:
    """Returns whether the local spec's attention has a kernel on a GPU whose memory grows with a row, without cp.

    Plain causal attention has one of torch's own choice. Windows and sinks have flash.py's alone, which does neither
    dropout, nor other than 16 bits, nor wider heads.
    """
    if not (attention.windowed or attention.sinks):
        return True
    widest = max(attention.query_size, attention.value_size)
    return dtype in (torch.bfloat16, torch.float16) and widest <= LARGEST_HEAD and not attention.dropout


def kernels(attention: Attention, gpu: Gpu, dtype: torch.dtype) -> tuple[Kernel, ...]:
    """Returns the kernels that serve it on a GPU of known generation."""
    assert gpu.capability is not None
    if _without_cp_communication(attention, gpu) is not None:
        return ()
    found: dict[Kernel, bool] = {
        "flash": _flash(attention, gpu, dtype),
        "fused": _fused(attention, gpu, dtype),
        # materialises the scores; every generation and type has it, and context parallelism has not
        "unfused": attention.cp == 1,
    }
    return tuple(kernel for kernel, serves in found.items() if serves)


def _without_cp_communication(attention: Attention, gpu: Gpu) -> str | None:
    """Returns why no way of exchanging keys and values serves it; None where one does."""
    cp, way = attention.cp, attention.cp_communication
    if way == "p2p":
        return None
    kind = "attention sinks" if attention.sinks else "sliding windows"
    if way == "a2a" and not attention.heads_split:
        heads = f"{attention.groups} key-value heads of a tensor-parallel rank"
        return f"has {kind} under cp {cp} only where cp divides the heads, an even number, and there are {heads}"
    since = {"a2a": (2, 12) if attention.sinks else (2, 10), "all_gather": (2, 18)}[way]
    if gpu.transformer_engine is not None and gpu.transformer_engine < since:
        have, need = (".".join(map(str, version)) for version in (gpu.transformer_engine, since))
        return f"{have} has no {kind} under cp {cp} for packed sequences: {need} does"
    return None


def _flash(attention: Attention, gpu: Gpu, dtype: torch.dtype) -> bool:
    """Returns whether flash-attn 2 serves it.

    Its third and fourth generations serve GPUs that the fused kernels serve too.

    Where keys are gathered, transformer-engine gives it all queries of a rank and the offsets of half of each sequence
    (2.20.2: its AttnFuncWithCPAndKVAllGather says that this kernel cannot take both, and nothing refuses it): queries
    and keys are then those of other tokens.
    """
    assert gpu.capability is not None
    least = (2, 7, 3) if gpu.capability >= (10, 0) else (2, 3)
    size = max(attention.query_size, attention.value_size)
    return (
        gpu.capability >= (8, 0)
        and (gpu.flash_attn is None or gpu.flash_attn >= least)
        and dtype in (torch.bfloat16, torch.float16)
        and not attention.sinks
        and attention.cp_communication != "all_gather"
        and size % 8 == 0
        and size <= (256 if gpu.capability in ((8, 0), (9, 0), (10, 0), (12, 0)) else 192)
    )


def _fused(attention: Attention, gpu: Gpu, dtype: torch.dtype) -> bool:
    """Returns whether cuDNN's kernel serves it, for packed sequences in training."""
    assert gpu.capability is not None
    cudnn = (99, 0, 0) if gpu.cudnn is None else gpu.cudnn
    hopper, blackwell = gpu.capability == (9, 0), gpu.capability >= (10, 0)
    query, value = attention.query_size, attention.value_size
    least = (9, 18, 1) if gpu.capability >= (12, 0) else (9, 7, 0) if blackwell else (9, 6, 0)
    if attention.sinks:
        least = max(least, (9, 18, 0))
    if query > 128 or value > 128:
        if query == value == 256 and blackwell:
            least = max(least, (9, 25, 0))
        elif (query, value) == (192, 128) and blackwell and gpu.capability != (12, 0):
            least = max(least, (9, 11, 0))
        elif not hopper or max(query, value) > 256 or _hopper_fault(query, value):
            return False
    return (
        gpu.capability >= (9, 0)
        and dtype in (torch.bfloat16, torch.float16)
        and not attention.dropout
        and query % 8 == value % 8 == 0
        and cudnn >= least
    )


def _hopper_fault(query: int, value: int) -> bool:
    """Returns whether transformer-engine keeps cuDNN from heads of these sizes in training: a fault of cuDNN 9.11."""
    return query != value and min(query, value) >= 128 and (query, value) != (192, 128)


def _words(attention: Attention, dtype: torch.dtype) -> str:
    parts = ["attention"]
    if attention.query_size != attention.value_size or attention.query_size > 128:
        sizes = sorted({attention.query_size, attention.value_size}, reverse=True)
        parts.append(f"with heads of {' and '.join(map(str, sizes))}")
    if attention.sinks:
        parts.append("with sinks")
    if attention.windowed:
        parts.append("with windows")
    if dtype not in (torch.bfloat16, torch.float16):
        parts.append(f"in {str(dtype).removeprefix('torch.')}")
    return " ".join(parts) + (f" under cp {attention.cp}" if attention.cp > 1 else "")
