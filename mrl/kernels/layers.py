"""Computes RMSNorm, rotary embedding and SwiGLU by one operator in each direction, where `operators.supports` says so.

They round as Hugging Face's modules: a bfloat16 input gives the same bits, but for the order of sums and the last bit
of an exponential. Gradients are computed in fp32 from the rounded numbers and rounded once. In fp32 the formula is that
of torch, within a few units in the last place.

Liger's kernels (liger-kernel) are not used. They are no operators, so fake tensors and torch.compile would stop at
them. They turn queries and keys in place, and have neither partial rotation nor weighted SwiGLU.

Dimensions: `N` channels of a norm or an activation, `T` tokens, `H` heads, `D` channels of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mrl.kernels import operators
from mrl.kernels.main_grad import main_grad_of, mark_added

_LAUNCHERS = "mrl.kernels.layer_launchers"
MAX_NORM = 32768  # channels that one program holds


def _dense(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# -- RMSNorm -----------------------------------------------------------------------------------------------------------

_rms_norm = operators.operator(
    "rms_norm(Tensor x, Tensor weight, float eps, bool centered) -> Tensor",
    _LAUNCHERS,
    lambda x, weight, eps, centered: _dense(x),
)
_rms_norm_backward = operators.operator(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, float eps, bool centered, Tensor(a!)? main_grad)"
    " -> (Tensor, Tensor)",
    _LAUNCHERS,
    lambda grad, x, weight, eps, centered, main_grad: (_dense(x), torch.empty_like(weight)),
)


class RMSNormFunction(torch.autograd.Function):
    """Adds the weight's gradient to megatron's fp32 buffer if `main_grad_of` gives one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, centered: bool) -> Tensor:
        # forward rounds to the weight's dtype, backward to x's
        assert x.dtype == weight.dtype, f"rms_norm needs one dtype: x is {x.dtype}, its weight {weight.dtype}"
        ctx.save_for_backward(x, weight)
        # a hook on saved tensors, as of offloaded activations, gives back an alias without these attributes
        ctx.parameter = weight if main_grad_of(weight) is not None and ctx.needs_input_grad[1] else None
        ctx.options = eps, centered
        return _rms_norm(x, weight, eps, centered)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        buffer = main_grad_of(ctx.parameter)
        of_x, of_weight = _rms_norm_backward(grad, x, weight, *ctx.options, buffer)
        if buffer is not None:
            mark_added(ctx.parameter)
        return of_x, of_weight, None, None


def norm_fits(x: Tensor, weight: Tensor) -> bool:
    """Returns whether `rms_norm` takes x [.., N] with this weight."""
    return operators.supports(x) and x.dtype == weight.dtype and x.shape[-1] == len(weight) <= MAX_NORM


def rms_norm(x: Tensor, weight: Tensor, eps: float, centered: bool = False) -> Tensor:
    """Returns weight * (x / rms(x)) over the last dimension of x [.., N]; x / rms(x) is rounded to x's dtype.

    centered: the factor is 1 + weight, and the product is rounded once.
    """
    return RMSNormFunction.apply(x, weight, eps, centered)


def rms_norm_without_gradient(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns `rms_norm` of x [.., N], or of x [.., K, N] with weight [K, N], a row for each of the K.

    x / rms(x) is rounded to the weight's dtype, so with a weight in fp32 the product alone is rounded.
    """
    return _rms_norm(x, weight, eps, False)


# -- rotary embedding --------------------------------------------------------------------------------------------------

_rotary = operators.operator(
    "rotary(Tensor q, Tensor k, Tensor cos, Tensor sin, bool back) -> (Tensor, Tensor)",
    _LAUNCHERS,
    lambda q, k, cos, sin, back: (_dense(q), _dense(k)),
)


class RotaryFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _rotary(q, k, cos, sin, False)

    @staticmethod
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor | None, ...]:
        return *_rotary(grad_q, grad_k, *ctx.saved_tensors, True), None, None


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turns the first R channels of each head, halves apart: x cos + [-b, a] sin for x = [a, b].

    q, k: [.., T, H, D] each, with their own numbers of heads. cos, sin: [.., T, R], for all or for each of the rows
    before T. Products are rounded to their dtype, so in fp32 the sum alone is rounded.
    """
    return RotaryFunction.apply(q, k, cos.contiguous(), sin.contiguous())


# -- SwiGLU ------------------------------------------------------------------------------------------------------------

_swiglu = operators.operator(
    "swiglu(Tensor gate, Tensor up, Tensor? weights) -> Tensor",
    _LAUNCHERS,
    lambda gate, up, weights: _dense(gate),
)


def _swiglu_gradients(
    grad: Tensor, gate: Tensor, up: Tensor, weights: Tensor | None, joint: bool
) -> tuple[Tensor, Tensor]:
    *rows, size = gate.shape
    both = gate.new_empty(*rows, 2 * size) if joint else gate.new_empty(2, *rows, size)
    return both, gate.new_empty(0) if weights is None else torch.empty_like(weights)


_swiglu_backward = operators.operator(
    "swiglu_backward(Tensor grad, Tensor gate, Tensor up, Tensor? weights, bool joint) -> (Tensor, Tensor)",
    _LAUNCHERS,
    _swiglu_gradients,
)


class SwiGLUFunction(torch.autograd.Function):
    """Has x [.., 2N] for both inputs, or gate and up [.., N] each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor | None, weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, up, weights)
        gate, up = x.chunk(2, dim=-1) if up is None else (x, up)
        return _swiglu(gate, up, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, up, weights = ctx.saved_tensors
        gate, other = x.chunk(2, dim=-1) if up is None else (x, up)
        both, of_weights = _swiglu_backward(grad, gate, other, weights, up is None)
        of_x, of_up = (both, None) if up is None else both.unbind()
        return of_x, of_up, None if weights is None else of_weights


def swiglu(x: Tensor, up: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
    """Returns silu(gate) * up [.., N] of x = [gate, up] [.., 2N], or of gate (x) and up [.., N] each.

    weights: [.., 1], one a row, in fp32; they multiply the result, which keeps x's dtype.
    """
    return SwiGLUFunction.apply(x, up, None if weights is None else weights.contiguous())
