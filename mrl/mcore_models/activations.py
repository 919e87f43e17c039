"""Replaces megatron's SwiGLU: by functions with few passes over memory on a CPU, by one kernel on a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from mrl import patches
from mrl.kernels import layers, operators


def replace_swiglu(plain: Callable[..., Any], weighted: Callable[..., Any]) -> None:
    """Replaces megatron's SwiGLU by one kernel, and by the given functions where the kernel does not fit.

    It does not fit with an option set, nor on a CPU, but for tests of kernels and plans of a GPU (`interpreted` and
    `planned` of mrl.kernels.operators). megatron's own functions are compiled by torch, again in each run, and round
    once, at the end. Hugging Face rounds silu as well, and so does the kernel.
    """

    def fits(x: Tensor, bias: Tensor | None, options: tuple[Any, ...]) -> bool:
        return bias is None and not any(options) and operators.supports(x)

    def swiglu(x: Tensor, bias: Tensor | None = None, *options: Any) -> Tensor:
        return layers.swiglu(x) if fits(x, bias, options) else plain(x, bias, *options)

    def weighted_swiglu(x: Tensor, bias: Tensor | None, weights: Tensor, *options: Any) -> Tensor:
        if fits(x, bias, options):
            return layers.swiglu(x, weights=weights)
        return weighted(x, bias, weights, *options)

    activations = {"bias_swiglu_impl": swiglu, "weighted_bias_swiglu_impl": weighted_swiglu}
    for module in ("mlp", "moe.experts", "moe.shared_experts"):  # all that import them
        path = f"megatron.core.transformer.{module}"
        here = vars(importlib.import_module(path))
        patches.replace({f"{path}:{name}": function for name, function in activations.items() if name in here})
