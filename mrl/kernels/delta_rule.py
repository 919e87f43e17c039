"""Computes the gated delta rule by the kernels of flash-linear-attention, if its package fla-core is installed.

They take tensors of two bytes on a GPU. In fp32 Triton's products would be TF32, so mrl's own rule computes these.
Under megatron's deterministic mode or torch's mrl's rule computes all: fla's autotuner times its kernels, so two
processes may round apart. fla sums decays in fp32, so gradients of A_log have fewer digits than mrl's.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from mrl.kernels import operators

OLDEST = Version("0.6")
"""The first version whose kernels were compared with mrl's rule (tests/kernels/test_delta_rule.py)."""

OWN = "mrl"
NAME = "gated_delta_nets"
"""Names the choice of a rule among those of an engine."""


@functools.cache
def _version() -> str | None:
    """Returns the version of fla-core, or None if it is absent or older than `OLDEST`."""
    try:
        version = importlib.metadata.version("fla-core")
    except importlib.metadata.PackageNotFoundError:
        return None
    return version if Version(version) >= OLDEST else None


@functools.cache
def _rule() -> Callable[..., Any]:
    # else fla calls FlashQLA in place of its own kernels where that package is; nobody compared it with mrl's rule
    os.environ.setdefault("FLA_FLASH_QLA", "0")
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule


def choice(dtype: torch.dtype, *, repeatable: bool = False) -> str:
    """Returns whose rule a GPU computes, with its version. repeatable: not by kernels that may round apart in another
    process."""
    repeatable |= torch.are_deterministic_algorithms_enabled()
    version = _version() if operators.CAN_COMPILE and dtype.itemsize == 2 and not repeatable else None
    return OWN if version is None else f"fla-core {version}"


def takes(value: Tensor, *, repeatable: bool) -> bool:
    """Returns whether fla's kernels compute the rule for these values."""
    return value.is_cuda and choice(value.dtype, repeatable=repeatable) != OWN


def notes(chosen: Mapping[str, str]) -> list[str]:
    """Returns a line for the user on whose rule runs. chosen: an engine's choices."""
    if NAME not in chosen:
        return []
    other = " (fla-core's runs in bfloat16 and float16 where it is installed: docs/supported-models.md)"
    return [f"gated delta nets: the rule of {chosen[NAME]}{other if chosen[NAME] == OWN else ''}"]


def chunked_rule(
    rows: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], cu_seqlens: tuple[Tensor, Tensor], state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns outputs [T, G, R, V] in the dtype of value, and states [N, G, R, K, V] in fp32.

    rows: query, key, value, decay and beta of `mrl.ops.delta_rule.chunked_rule`. cu_seqlens: [N + 1] of the sequences
    and their end, on the device and on the CPU. fla makes indices of chunks once for each such tensor.
    """
    query, key, value, decay, beta = rows
    heads, sharing = value.shape[1:3]
    out, after = _rule()(
        *(x.to(value.dtype)[None] for x in (query, key)), value.flatten(1, 2)[None],
        decay.flatten(1)[None], beta.flatten(1)[None],
        initial_state=None if state is None else state.float().flatten(1, 2), output_final_state=True,
        cu_seqlens=cu_seqlens[0], cu_seqlens_cpu=cu_seqlens[1],
    )  # fmt: skip
    return out[0].unflatten(1, (heads, sharing)), after.unflatten(1, (heads, sharing))
