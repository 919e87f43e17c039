"""Says which kernels of transformer-engine's attention serve a model in a layout on a GPU.

transformer-engine chooses at the first forward. If nothing is left, a worker ends in a ValueError. The table here says
so before, from a model's fields and the variables that switch kernels off. tests/cuda/test_te.py compares it with
transformer-engine's own choice. Sources: `get_attention_backend` and `attn_forward_func_with_cp` of its Python, and
`nvte_get_fused_attn_backend` of its C++, 2.20. Micro-batches are packed ("thd"), without padding between sequences.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Literal

import torch
from packaging.version import Version

from mrl.mcore_models.versions import NOT_INSTALLED, flash_attn_bounds, version_of
from mrl.ops.devices import has_gpu
from mrl.parallel import ParallelDims

Kernel = Literal["flash", "fused", "unfused"]
CpCommunication = Literal["p2p", "a2a", "all_gather"]

GENERATIONS = {(8, 0): "A100", (8, 9): "L40S", (9, 0): "H100", (10, 0): "B200", (12, 0): "RTX 50"}
"""Compute capabilities, and a GPU of each: RTX 40 is as L40S, H200 as H100."""

SWITCHES: Mapping[str, Kernel] = {
    "NVTE_FLASH_ATTN": "flash",
    "NVTE_FUSED_ATTN": "fused",
    "NVTE_UNFUSED_ATTN": "unfused",
}
"""Environment variables of transformer-engine, and the kernel that each leaves out if it is 0."""


def switches_of(attention: str) -> dict[str, str]:
    """Returns the variables for a value of engine.attention: 1 for its kernel, 0 for the others; none for auto.

    megatron's `_set_attention_backend` sets the same. transformer-engine reads them whenever it chooses (2.20.2,
    `get_attention_backend`), so they may be set after its import.
    """
    if attention == "auto":
        return {}
    return {name: "1" if kernel == attention else "0" for name, kernel in SWITCHES.items()}


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Is a GPU and what is installed for its attention. None stands for what is not known, and is assumed to do."""

    capability: tuple[int, int] | None = None  # compute capability, (9, 0) for H100
    flash_attn: Version | None = None  # of flash-attn 2; NOT_INSTALLED where it is not installed
    cudnn: tuple[int, int, int] | None = None
    transformer_engine: Version | None = None
    switched_off: tuple[str, ...] = ()  # those of SWITCHES that are 0
    newer_flash_attn: tuple[int, ...] = ()  # those of flash-attn's generations 3 and 4 that are installed too
    by_key: bool = False  # whether engine.attention set SWITCHES

    @classmethod
    def here(cls) -> "Gpu":
        """Returns this process's GPU. Without one only the variables are known, as the run may be for another
        machine."""
        if not has_gpu():
            return cls(switched_off=disabled_switches())
        number = torch.backends.cudnn.version()  # 92501 is 9.25.1; None where torch has no cuDNN
        engine = version_of("transformer-engine")
        return cls(
            torch.cuda.get_device_capability(),
            version_of("flash-attn"),
            None if number is None else (number // 10_000, number // 100 % 100, number % 100),
            None if engine == NOT_INSTALLED else engine,
            disabled_switches(),
            tuple(n for n in (3, 4) if version_of(f"flash-attn-{n}") != NOT_INSTALLED),
        )

    @property
    def is_blackwell(self) -> bool:
        return self.capability is not None and self.capability >= (10, 0)


def disabled_switches(attention: str = "auto") -> tuple[str, ...]:
    """Returns the names of SWITCHES that are 0, in the environment or for a value of engine.attention."""
    environment = {**os.environ, **switches_of(attention)}
    return tuple(name for name in SWITCHES if environment.get(name) == "0")


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """Holds the properties of a model and a layout that decide the attention kernel."""

    heads: int  # of a tensor-parallel rank
    groups: int  # key-value heads of one
    query_size: int  # of a head's queries and keys
    value_size: int
    windowed: bool  # in some layer
    sinks: bool
    dropout: bool
    cp: int

    @classmethod
    def of(cls, fields: Mapping[str, Any], dims: ParallelDims) -> "AttentionShape":
        """Returns the shape of `fields`: those of megatron's configuration, as `fields_of` has them."""
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
        """Returns whether context-parallel ranks can each have whole heads, as transformer-engine's a2a gives them.

        cuDNN's kernel takes no odd number of heads there, whatever cp is (2.20.2, `get_attention_backend`).
        """
        return not any(n % self.cp or n % 2 for n in (self.heads, self.groups))

    @property
    def cp_communication(self) -> CpCommunication:
        """Returns how context-parallel ranks exchange keys and values. p2p, a ring, is transformer-engine's default.

        It has no windows in a ring, and sinks only if ranks exchange heads (a2a).
        """
        if self.cp == 1 or not (self.windowed or self.sinks):
            return "p2p"
        return "a2a" if self.sinks or self.heads_split else "all_gather"


def cp_comm_type(fields: Mapping[str, Any], dims: ParallelDims) -> CpCommunication:
    """Returns megatron's `cp_comm_type` for a model under transformer-engine."""
    return AttentionShape.of(fields, dims).cp_communication


def te_refusal(
    fields: Mapping[str, Any], dims: ParallelDims, gpu: Gpu, *, dtype: torch.dtype = torch.bfloat16
) -> str | None:
    """Returns why transformer-engine has no attention for a model in a layout, as the end of a sentence; None if it
    has.

    If the generation of `gpu` is not known, a model that some generation serves is not refused.
    """
    attention = AttentionShape.of(fields, dims)
    why = _without_cp_communication(attention, gpu)
    if why is not None:
        return why
    if _some(attention, gpu, dtype):
        return None
    kind = "any GPU"
    if gpu.capability is not None:
        kind = f"GPUs of compute capability {gpu.capability[0]}.{gpu.capability[1]}"
    return f"has no kernel for {_words(attention, dtype)} on {kind}{_cures(attention, gpu, dtype)}"


def _some(attention: AttentionShape, gpu: Gpu, dtype: torch.dtype) -> set[Kernel]:
    """Returns the kernels that serve it on the GPU, or on some generation if the GPU's is not known."""
    generations = GENERATIONS if gpu.capability is None else (gpu.capability,)
    return {k for one in generations for k in kernels(attention, dataclasses.replace(gpu, capability=one), dtype)}


def _cures(attention: AttentionShape, gpu: Gpu, dtype: torch.dtype) -> str:
    """Returns what keeps a better kernel from it: a flash-attn that is not here, and variables of the environment.

    "" for nothing.
    """
    text = ""
    if "flash" in _some(attention, dataclasses.replace(gpu, flash_attn=None), dtype):
        text = f" without flash-attn {flash_attn_bounds(gpu.transformer_engine, blackwell=gpu.is_blackwell)}"
    could = _some(attention, dataclasses.replace(gpu, switched_off=()), dtype)
    off = () if gpu.by_key else gpu.switched_off
    variables = " and ".join(f"{name}=0" for name in off if SWITCHES[name] in could)
    return text + (f" with {variables}" if variables else "")


def te_warning(
    fields: Mapping[str, Any], dims: ParallelDims, gpu: Gpu, *, dtype: torch.dtype = torch.bfloat16
) -> str | None:
    """Returns a warning if a model's attention under transformer-engine is the unfused one alone, else None.

    The local spec's attention keeps no scores (causal.py).
    """
    attention = AttentionShape.of(fields, dims)
    if _some(attention, gpu, dtype) != {"unfused"}:
        return None
    what = "attention in float32" if dtype == torch.float32 else "attention"
    cures = _cures(attention, gpu, dtype)
    return f"{what}{cures} is the unfused one, whose memory grows with the square of a row"


def kernels(attention: AttentionShape, gpu: Gpu, dtype: torch.dtype) -> tuple[Kernel, ...]:
    """Returns the kernels that serve it on a GPU of known generation; transformer-engine takes the first.

    It prefers cuDNN's to flash-attn on H100 and later ("FusedAttention preference on Hopper+"). On older ones cuDNN's
    serves no packed sequences.
    """
    assert gpu.capability is not None
    if _without_cp_communication(attention, gpu) is not None:
        return ()
    answers: dict[Kernel, bool] = {
        "fused": _fused(attention, gpu, dtype) and "NVTE_FUSED_ATTN" not in gpu.switched_off,
        "flash": _flash(attention, gpu, dtype) and "NVTE_FLASH_ATTN" not in gpu.switched_off,
        # materialises the scores; every generation and type has it, and context parallelism has not
        "unfused": attention.cp == 1 and "NVTE_UNFUSED_ATTN" not in gpu.switched_off,
    }
    return tuple(kernel for kernel, serves in answers.items() if serves)


def _without_cp_communication(attention: AttentionShape, gpu: Gpu) -> str | None:
    """Returns why no way of exchanging keys and values serves it; None if one does."""
    cp, way = attention.cp, attention.cp_communication
    if way == "p2p":
        return None
    kind = "attention sinks" if attention.sinks else "sliding windows"
    if way == "a2a" and not attention.heads_split:
        heads = f"{attention.groups} key-value heads of a tensor-parallel rank"
        return f"has {kind} under cp {cp} only where cp divides the heads, an even number, and there are {heads}"
    since = Version({"a2a": "2.12" if attention.sinks else "2.10", "all_gather": "2.18"}[way])
    if gpu.transformer_engine is not None and gpu.transformer_engine < since:
        return f"{gpu.transformer_engine} has no {kind} under cp {cp} for packed sequences: {since} does"
    return None


def _flash(attention: AttentionShape, gpu: Gpu, dtype: torch.dtype) -> bool:
    """Returns whether a flash-attn serves it.

    If keys are gathered, transformer-engine gives it all queries of a rank and the offsets of half of each sequence.
    Queries and keys are then those of other tokens. In 2.20.2 AttnFuncWithCPAndKVAllGather says that this kernel cannot
    take both, and nothing refuses it.
    """
    assert gpu.capability is not None
    size = max(attention.query_size, attention.value_size)
    bounds = flash_attn_bounds(gpu.transformer_engine, blackwell=gpu.is_blackwell)
    second = (
        (gpu.flash_attn is None or bounds.take(gpu.flash_attn))
        and gpu.capability >= (8, 0)
        and size <= (256 if gpu.capability in ((8, 0), (9, 0), (10, 0), (12, 0)) else 192)
    )
    # both do this: wider heads have the fused kernels, or FlashAttention 4 on some GPUs
    newer = (3 in gpu.newer_flash_attn and gpu.capability == (9, 0)) or (
        4 in gpu.newer_flash_attn and gpu.capability >= (9, 0)
    )
    return (
        (second or (newer and size <= 128 and not attention.dropout))
        and dtype in (torch.bfloat16, torch.float16)
        and not attention.sinks
        and attention.cp_communication != "all_gather"
        and size % 8 == 0
    )


def _fused(attention: AttentionShape, gpu: Gpu, dtype: torch.dtype) -> bool:
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


def _words(attention: AttentionShape, dtype: torch.dtype) -> str:
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
