"""Computes the gated delta rule by the kernels of flash-linear-attention, if its package fla-core is installed.

They take tensors of two bytes on a GPU. In fp32 Triton's products would be TF32, so mrl's own rule computes these. A
model in deterministic mode has mrl's rule, too: fla's autotuner times its kernels, so two processes may round apart.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

OLDEST = (0, 6)
"""The first version whose kernels were compared with mrl's rule (tests/kernels/test_delta_rule.py)."""

OWN = "mrl"
NAME = "gated_delta_nets"
"""Names the choice of a rule among those of an engine."""


@functools.cache
def _rule() -> Callable[..., Any] | None:
    """Returns `chunk_gated_delta_rule` of fla, or None if it is absent or older than `OLDEST`."""
    if importlib.util.find_spec("fla") is None:
        return None
    numbers = importlib.metadata.version("fla-core").split(".")[:2]
    if tuple(int(number) for number in numbers) < OLDEST:
        return None
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule


def takes(value: Tensor) -> bool:
    """Returns whether fla's kernels compute the rule for these values."""
    return value.is_cuda and choice(value.dtype) != OWN


def choice(dtype: torch.dtype, *, repeatable: bool = False) -> str:
    """Returns whose rule a GPU computes, with its version. repeatable: not by kernels that may round apart in another
    process."""
    if dtype.itemsize != 2 or repeatable or _rule() is None:
        return OWN
    return f"fla-core {importlib.metadata.version('fla-core')}"


def notes(chosen: Mapping[str, str]) -> list[str]:
    """Returns a line for the user on whose rule runs. chosen: an engine's choices."""
    if NAME not in chosen:
        return []
    other = " (fla-core's runs in bfloat16 and float16 where it is installed: docs/supported-models.md)"
    return [f"gated delta nets: the rule of {chosen[NAME]}{other if chosen[NAME] == OWN else ''}"]


def chunked_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, starts: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns outputs [T, G, R, V] in the dtype of value, and states [N, G, R, K, V] in fp32.

    Arguments are those of `mrl.ops.delta_rule.chunked_rule`. starts: [N + 1], on the CPU, of the sequences and their
    end.
    """
    rule = _rule()
    assert rule is not None
    heads, sharing = value.shape[1:3]
    out, after = rule(
        *(x.to(value.dtype)[None] for x in (query, key)), value.flatten(1, 2)[None],
        decay.flatten(1)[None], beta.flatten(1)[None],
        initial_state=None if state is None else state.float().flatten(1, 2), output_final_state=True,
        cu_seqlens=starts.to(value.device, non_blocking=True), cu_seqlens_cpu=starts,
    )  # fmt: skip
    return out[0].unflatten(1, (heads, sharing)), after.unflatten(1, (heads, sharing))
