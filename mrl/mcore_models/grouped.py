"""Computes the experts of a layer by grouped matrix products: one kernel for all (`torch.nn.functional.grouped_mm`).

Under the local spec megatron-core multiplies expert after expert. transformer-engine starts one product of cuBLAS for
each, of another shape every time. An expert has six products in a micro-batch. On an H100 each took the host 0.1 ms,
and the GPU waited for it (benchmarks/results/gpu-h100-training.md).

Modules, parameters and their names stay as they are, of either spec. Only the order of sums changes. Each expert's
weight stays a parameter, so checkpoints, adapters, Muon and guards see what they see of experts one by one. But the
weights of a linear layer lie one after the other in memory, and so do their gradients in DDP's buffer: a product takes
them as one tensor, and one addition adds their gradients. Only if a bucket of DDP ends between two experts, products
stack them.

Dimensions: `T` tokens of all experts of a rank, `E` its experts, `I` inputs and `O` outputs of a linear layer.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from mrl import patches
from mrl.mcore_models import dispatch
from mrl.mcore_models.layout import ALIGNMENT
from mrl.ops import devices

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
    return spec == "local" and _has_kernel(dtype, capability)


def _has_kernel(dtype: torch.dtype, capability: tuple[int, int] | None) -> bool:
    return dtype == torch.bfloat16 and capability is not None and capability[0] in CAPABILITIES


def works_on_device(x: Tensor) -> bool:
    """Returns whether a product of x waits for no host, so a CUDA graph takes it."""
    return x.is_cpu or _has_kernel(x.dtype, devices.capability())


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
                pairs = [(part.linear_fc1.weight, part.linear_fc2.weight) for part in experts.local_experts]
                experts.grouped_weights = [ExpertWeights(weights) for weights in zip(*pairs, strict=True)]
                experts.forward = types.MethodType(_sequential, experts)
                if counts_stay(layer):
                    dispatch.keep_counts_on_device(layer.token_dispatcher)
        elif isinstance(experts, TEGroupedMLP):
            linear = (experts.linear_fc1, experts.linear_fc2)
            biased = any(name.startswith("bias") for part in linear for name, _ in part.named_parameters())
            if not biased and _fit([part.weight0 for part in linear]):
                for part in linear:
                    each = [part.get_parameter(f"weight{i}") for i in range(part.num_gemms)]
                    part.grouped_weights = [ExpertWeights(each)]
                    part.forward = types.MethodType(_grouped, part)


def counts_stay(layer: MoELayer) -> bool:
    """Returns whether a layer of experts leaves their row counts on the device."""
    return hasattr(layer.experts, "grouped_weights") and dispatch.is_of_one_rank(layer.token_dispatcher)


def all_counts_stay(model: torch.nn.Module) -> bool:
    """Returns whether all layers of experts do so; true without any."""
    return all(counts_stay(layer) for layer in model.modules() if isinstance(layer, MoELayer))


def _fit(weights: Iterable[Tensor]) -> bool:
    return not any(size * weight.element_size() % ALIGNMENT for weight in weights for size in weight.shape)


class ExpertWeights:
    """Holds the weights of a linear layer of all experts of a rank, which lie one after the other in memory.

    `tensors` is what a product takes: one tensor [E, O, I], or the parameters if DDP laid them out with a gap.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters = parameters
        together = torch.stack([parameter.detach() for parameter in parameters])
        for parameter, own in zip(parameters, together, strict=True):
            parameter.data = own
        self.tensors: Sequence[Tensor] = [together]
        self.gradients: Tensor | None = None  # [E, O, I] in DDP's buffer, if the one tensor trains

    def join(self, ddp: DistributedDataParallel) -> None:
        """Follows trained parameters into DDP's buffers, and adds their gradients there.

        Autograd sees the one tensor and none of the parameters, so DDP's hooks of these never run. What they do is done
        here.
        """
        if not self.parameters[0].requires_grad:
            return
        weights = _as_one([parameter.detach() for parameter in self.parameters])
        gradients = _as_one([parameter.main_grad for parameter in self.parameters])
        self.tensors = self.parameters
        if weights is None or gradients is None:  # a bucket ends between two of them, with padding
            return

        def add(weight: Tensor) -> None:
            gradients.add_(weight.grad)
            weight.grad = None
            if ddp.ddp_config.overlap_grad_reduce:
                for parameter in self.parameters:
                    ddp.param_to_bucket_group[parameter].register_grad_ready(parameter, ddp.force_all_reduce)

        weights.requires_grad_().register_post_accumulate_grad_hook(add)
        self.tensors, self.gradients = [weights], gradients


def _as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """Returns a view [E, ...] of E tensors with equal distances in one memory; None if they lie otherwise."""
    first = tensors[0]
    places = [tensor.storage_offset() for tensor in tensors]
    step = places[1] - places[0] if len(places) > 1 else first.numel()
    if step < first.numel() or places != list(range(places[0], places[0] + step * len(places), step)):
        return None
    assert len({tensor.untyped_storage()._cdata for tensor in tensors}) == 1, "experts lie in several buffers"
    return first.as_strided((len(tensors), *first.shape), (step, *first.stride()))


def weights_of(model: torch.nn.Module) -> Iterator[ExpertWeights]:
    """Yields the weights of all linear layers of experts that `install` has changed."""
    for module in model.modules():
        yield from getattr(module, "grouped_weights", ())


def in_buffer_order(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Returns the named parameters in an order in which DDP lays out weights of `ExpertWeights` one after the other.

    DDP lays parameters out from the last to the first (0.16.1 and 0.19.2, param_and_grad_buffer), and experts one by
    one would have both of their matrices side by side.
    """
    named = list(model.named_parameters())
    places = {id(parameter): (number, 0) for number, (_, parameter) in enumerate(named)}
    for weights in weights_of(model):
        first, _ = places[id(weights.parameters[0])]
        places |= {id(parameter): (first, -number) for number, parameter in enumerate(weights.parameters)}
    return sorted(named, key=lambda pair: places[id(pair[1])])


class GroupedProduct(torch.autograd.Function):
    """Multiplies the rows x_e of each expert by its weights: x_e weights[e]^T. x: [T, I], expert by expert; weights:
    [E, O, I], or [O, I] each.

    Returns [T, O]. ends [E] (int32): the row after each expert's last. Several weights are stacked for a product, and
    again for the backward pass, so a copy takes memory only during a product. Tensors that no gradient needs are not
    kept.

    Kernels take no empty input: without rows, the result is empty and gradients are zero. megatron-core never computes
    such experts instead. If it adds gradients to its buffer itself, it marks the weights. A gradient from here in a
    later micro-batch would then be left out.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        of_x, of_weights, ctx.rows = ctx.needs_input_grad[0], any(ctx.needs_input_grad[2:]), len(x)
        ctx.save_for_backward(x if of_weights else None, ends, *(weights if of_x or not len(x) else ()))
        if not len(x):
            return x.new_empty(0, weights[0].shape[-2])
        return F.grouped_mm(x, _stacked(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, ends, *weights = ctx.saved_tensors
        if not ctx.rows:
            return grad.new_zeros(0, weights[0].shape[-1]), None, *map(torch.zeros_like, weights)
        grad = grad.contiguous()
        of_x: Tensor | None = None
        of_weights: Sequence[Tensor | None] = [None] * (len(ctx.needs_input_grad) - 2)
        if ctx.needs_input_grad[0]:
            of_x = F.grouped_mm(grad, _stacked(weights), offs=ends)
        if any(ctx.needs_input_grad[2:]):
            together = F.grouped_mm(grad.t(), x, offs=ends)
            of_weights = [together] if len(of_weights) == 1 else together.unbind()
        return of_x, None, *of_weights


def _stacked(weights: Sequence[Tensor]) -> Tensor:
    return weights[0] if weights[0].dim() == 3 else torch.stack(weights)


def row_ends(counts: Tensor, x: Tensor) -> Tensor:
    """Returns `ends` of `GroupedProduct`, of experts with `counts` [E] rows of x each, on the host or x's device."""
    ends = counts.cumsum(0, dtype=torch.int32)
    if ends.device.type == "cpu":
        assert ends[-1] == len(x), f"experts have {int(ends[-1])} of {len(x)} rows"
        ends = (ends.pin_memory() if x.is_cuda else ends).to(x.device, non_blocking=True)
    return ends


def grouped_product(x: Tensor, ends: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Returns `GroupedProduct`, which takes rows that are contiguous."""
    return GroupedProduct.apply(x.contiguous(), ends, *weights)


def _grouped(self: Any, x: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, None]:
    """Replaces the forward pass of a linear layer of all experts (TEGroupedLinear)."""
    return grouped_product(x, row_ends(torch.tensor(m_splits), x), self.grouped_weights[0].tensors), None


def _sequential(self: Any, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
    """Replaces the forward pass of `SequentialMLP` by its first expert's, with linear layers of all experts."""
    # from the end of DDP's buffer, which is the order in which it gathers
    last_first = list(self.local_experts)[::-1]
    linear = [expert.linear_fc1 for expert in last_first] + [expert.linear_fc2 for expert in last_first]
    if any(part._forward_hooks for part in linear):  # each adds what its adapter gives
        return type(self).forward(self, hidden, tokens_per_expert, probs)
    # the hooks of megatron's DDP wait for weights that are being gathered (overlap_param_gather); a call of the experts
    # would run them, and none is called here
    for part in linear:
        for hook in part._forward_pre_hooks.values():
            hook(part, (hidden,))
    ends = row_ends(tokens_per_expert, hidden)
    multiply = [
        lambda x, weights=weights: grouped_product(x, ends, weights.tensors) for weights in self.grouped_weights
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
