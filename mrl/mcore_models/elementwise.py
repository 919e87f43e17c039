"""Computes RMSNorm, SwiGLU and rotary embedding with few passes over memory, for the CPU.

On a CPU an elementwise operation costs a pass over memory, and autograd splits these functions into many. Here each is
one autograd function. It keeps its input alone and computes the rest again, in place if it can. A GPU has fused kernels
for them. Dimensions: `T` tokens, `N` channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class RMSNormFunction(torch.autograd.Function):
    """Computes x / rms(x) * weight over the last dimension; x fp32 [..., N], weight [N].

    Let r = 1 / rms and u = x r. The gradient of x is r (g w - u mean(g w u)). The gradient of weight is the sum of g u.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        rstd = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        return (x * rstd).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        unit = x * rstd
        product = grad * unit
        grad_weight = product.sum(dim=tuple(range(product.ndim - 1))) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        mean = (product @ weight).div_(x.shape[-1]).unsqueeze(-1)
        grad_x = torch.mul(grad, weight, out=product)
        return grad_x.addcmul_(unit, mean, value=-1.0).mul_(rstd), grad_weight, None


class SwiGLUFunction(torch.autograd.Function):
    """Computes silu(a) * b of x = [a, b] [..., 2N]; returns [..., N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, linear = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(linear)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, linear = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        grad_gate, grad_linear = grad_x.chunk(2, dim=-1)
        silu = F.silu(gate)
        torch.mul(grad, silu, out=grad_linear)
        torch.ops.aten.silu_backward.grad_input(torch.mul(grad, linear, out=silu), gate, grad_input=grad_gate)
        return grad_x


def swiglu(x: Tensor, bias: Tensor | None = None, *_: Any) -> Tensor:
    """Replaces megatron's `bias_swiglu_impl`. Its other options follow and are not set here."""
    return SwiGLUFunction.apply(x if bias is None else x + bias)


def weighted_swiglu(x: Tensor, bias: Tensor | None, weights: Tensor, *_: Any) -> Tensor:
    """Replaces megatron's `weighted_bias_swiglu_impl`: the router's weights are fp32, the result has x's dtype."""
    return (swiglu(x, bias) * weights).to(x.dtype)


class RotaryFunction(torch.autograd.Function):
    """Computes t cos + rotate(t) sin; rotate([a, b]) = [-b, a] halves the last dimension."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate_halves(t, cos, sin, -1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return rotate_halves(grad, cos, sin, 1.0), None, None


def rotate_halves(t: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """Returns [a cos + sign b sin, b cos - sign a sin]: forward for -1, transposed for 1. Halves of sin and cos are
    equal."""
    half = t.shape[-1] // 2
    out = t * cos
    out[..., :half].addcmul_(t[..., half:], sin[..., :half], value=sign)
    out[..., half:].addcmul_(t[..., :half], sin[..., half:], value=-sign)
    return out


def rotary(t: Tensor, angles: Tensor) -> Tensor:
    """Turns t [T, 1, heads, D] by angles [T, 1, 1, D], both halves alike.

    Every layer gets the same angles, so their cosines and sines stay with them.
    """
    known = getattr(angles, "cos_sin", None)
    if known is None or known[0].dtype != t.dtype:
        known = angles.cos_sin = (angles.cos().to(t.dtype), angles.sin().to(t.dtype))
    return RotaryFunction.apply(t, *known)
