"""Computes the experts of a layer by grouped matrix products: one kernel for all (`torch.nn.functional.grouped_mm`).

Under the local spec megatron-core multiplies expert after expert. transformer-engine starts one product of cuBLAS for
each, of another shape every time. An expert has six products in a micro-batch. On an H100 each took the host 0.1 ms,
and the GPU waited for it (benchmarks/results/gpu-h100-training.md).

Modules, parameters and their names stay as they are, of either spec. Only the order of sums changes. Dimensions: `T`
tokens of all experts of a rank, `E` its experts, `I` inputs and `O` outputs of a linear layer.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from mrl import patches
from mrl.mcore_models import dispatch
from mrl.mcore_models.layout import ALIGNMENT

CAPABILITIES = (9, 10)
"""Major compute capabilities for which torch has the kernel (H100, B200), of bfloat16. Otherwise it takes expert after
expert, and asks the host for their rows."""


def is_chosen(wanted: bool | str, spec: str, dtype: torch.dtype, capability: tuple[int, int] | None) -> bool:
    """Returns whether `engine.moe.grouped_mm` comes to true.

    `auto` is true under the local spec if a GPU of this capability has the kernel for weights of this dtype.
    capability: None without a GPU.
    """
    if wanted != "auto":
        return bool(wanted)
    return spec == "local" and dtype == torch.bfloat16 and capability is not None and capability[0] in CAPABILITIES


def install(chunks: Iterable[torch.nn.Module]) -> None:
    """Makes the experts of all layers multiply by grouped products.

    Experts with biases, and sizes that the kernel does not take, stay as they are.
    """
    patches.check(__name__)
    for layer in (m for chunk in chunks for m in chunk.modules() if isinstance(m, MoELayer)):
        experts = layer.experts
        if isinstance(experts, SequentialMLP) and len(experts.local_experts) > 1:
            one = experts.local_experts[0]
            if one.linear_fc1.bias is None and _fit([one.linear_fc1.weight, one.linear_fc2.weight]):
                experts.forward = types.MethodType(_sequential, experts)
                if dispatch.is_of_one_rank(layer.token_dispatcher):
                    dispatch.keep_counts_on_device(layer.token_dispatcher)
        elif isinstance(experts, TEGroupedMLP):
            linear = (experts.linear_fc1, experts.linear_fc2)
            biased = any(name.startswith("bias") for part in linear for name, _ in part.named_parameters())
            if not biased and _fit([part.weight0 for part in linear]):
                for part in linear:
                    part.forward = types.MethodType(_grouped, part)


def _fit(weights: Iterable[Tensor]) -> bool:
    return not any(size * weight.element_size() % ALIGNMENT for weight in weights for size in weight.shape)


class GroupedProduct(torch.autograd.Function):
    """Multiplies the rows x_e of each expert by its weights: x_e weights[e]^T. x: [T, I], expert by expert; weights:
    [O, I] each.

    Returns [T, O]. ends [E] (int32): the row after each expert's last. Weights are stacked for a product, and again for
    the backward pass, so a copy takes memory only during a product. Their gradients are one tensor, which lives until
    the last of them is added. Tensors that no gradient needs are not kept.

    Kernels take no empty input: without rows, the result is empty and gradients are zero. megatron-core never computes
    such experts instead. If it adds gradients to its buffer itself, it marks the weights. A gradient from here in a
    later micro-batch would then be left out.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        of_x, of_weights, ctx.rows = ctx.needs_input_grad[0], any(ctx.needs_input_grad[2:]), len(x)
        ctx.save_for_backward(x if of_weights else None, ends, *(weights if of_x or not len(x) else ()))
        if not len(x):
            return x.new_empty(0, len(weights[0]))
        return F.grouped_mm(x, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, ends, *weights = ctx.saved_tensors
        if not ctx.rows:
            return grad.new_zeros(0, weights[0].shape[1]), None, *map(torch.zeros_like, weights)
        grad = grad.contiguous()
        of_x: Tensor | None = None
        of_weights: Sequence[Tensor | None] = [None] * (len(ctx.needs_input_grad) - 2)
        if ctx.needs_input_grad[0]:
            of_x = F.grouped_mm(grad, torch.stack(weights), offs=ends)
        if any(ctx.needs_input_grad[2:]):
            of_weights = F.grouped_mm(grad.t(), x, offs=ends).unbind()
        return of_x, None, *of_weights


def grouped_product(x: Tensor, counts: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Returns `GroupedProduct` of experts with `counts` [E] rows each, on the host or on the device of x."""
    ends = counts.cumsum(0, dtype=torch.int32)
    if ends.device.type == "cpu":
        assert ends[-1] == len(x), f"experts have {int(ends[-1])} of {len(x)} rows"
        ends = (ends.pin_memory() if x.is_cuda else ends).to(x.device, non_blocking=True)
    return GroupedProduct.apply(x.contiguous(), ends, *weights)


def _grouped(self: Any, x: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, None]:
    """Replaces the forward pass of a linear layer of all experts (TEGroupedLinear)."""
    weights = [self.get_parameter(f"weight{i}") for i in range(self.num_gemms)]
    return grouped_product(x, torch.tensor(m_splits), weights), None


def _sequential(self: Any, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
    """Replaces the forward pass of `SequentialMLP` by its first expert's, with linear layers of all experts."""
    linear = [[getattr(expert, name) for expert in self.local_experts] for name in ("linear_fc1", "linear_fc2")]
    adapted = any(part._forward_hooks for parts in linear for part in parts)  # each adds what its adapter gives
    if adapted:
        return type(self).forward(self, hidden, tokens_per_expert, probs)
    # the hooks of megatron's DDP wait for weights that are being gathered (overlap_param_gather); a call of the experts
    # would run them, and none is called here
    for part in itertools.chain(*linear):
        for hook in part._forward_pre_hooks.values():
            hook(part, (hidden,))
    multiply = [
        lambda x, parts=parts: grouped_product(x, tokens_per_expert, [part.weight for part in parts])
        for parts in linear
    ]
    return MLP.forward(_ExpertModule(self.local_experts[0], *multiply), hidden, probs)


class _ExpertModule(torch.nn.Module):
    """Is an expert with other linear layers. megatron-core asks for a module."""

    def __init__(self, expert: MLP, fc1: Callable[[Tensor], Tensor], fc2: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = AllExpertsLinear(fc1), AllExpertsLinear(fc2)
        self.__dict__["expert"] = expert  # not as a part of this module

    def __getattr__(self, name: str) -> Any:
        modules = self.__dict__["_modules"]
        return modules[name] if name in modules else getattr(self.__dict__["expert"], name)


class AllExpertsLinear(torch.nn.Module):
    """Calls the linear layers of all experts like those of one."""

    def __init__(self, multiply: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.multiply = multiply

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.multiply(x), None
