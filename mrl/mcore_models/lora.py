"""Adds low-rank adapters (Hu et al., arXiv 2106.09685) to megatron's linear layers: y = W x + scale * B A x, W frozen.

A linear of megatron's may hold several of Hugging Face's (q, k and v; gate and up). Each of these has its own A and B,
as peft trains them, and any of them may have none. Only A x, of `rank` channels, crosses ranks:

    column-parallel   A is whole on every rank and B is split like the rows of W. A x is gathered along the sequence
                      (its gradient scattered); without sequence parallelism its gradient is summed over the ranks
    row-parallel      A is split like the columns of W and B is whole. A x is summed and scattered along the sequence,
                      or summed
    whole             both are whole and nothing is communicated (latent attention's down-projections, routers)
    expert            nothing is communicated: every rank of an expert has all of its tokens, and the dispatcher sums
                      what they give. The gradient of the whole tensor is a part on each rank: `sum_over_experts_tp`.
                      A linear of all experts of a rank has an adapter for each (`GroupedAdapter`)

Under sequence parallelism each rank has a part of a whole tensor's gradient too. megatron sums these parts like those
of norms (`sequence_parallel` on the parameter).

Dimensions: `T` tokens, `I` inputs and `O` outputs of the linear on this rank, `R` rank of an adapter, `P` adapters of a
linear.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mrl.ops import devices

NAME = "adapter"
"""The name in a module of the adapter of its linear, or of itself."""
Split = Literal["column", "row", "whole"]


@dataclasses.dataclass(frozen=True)
class AdapterBlock:
    """Is one Hugging Face adapter of a linear."""

    name: str  # its parameters are `A.name` and `B.name`
    blocks: tuple[tuple[int, int], ...]
    """(first row, count) of its outputs on this rank, in the order of B's rows; empty if it has none."""


class Adapter(torch.nn.Module):
    """Holds the adapters of one linear. A: name -> [R, I]. B: name -> [rows of its blocks, R]; absent if there are no
    rows.

    split: how the linear is. All parts have one rank and scale. Values are whatever the memory holds: fill them.
    """

    def __init__(
        self, config: TransformerConfig, parts: Sequence[AdapterBlock], *, split: Split, expert: bool, inputs: int,
        outputs: int, rank: int, scale: float, dropout: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.split, self.expert, self.scale, self.dropout, self.outputs = split, expert, scale, dropout, outputs
        self.enabled = True
        self.sp = config.sequence_parallel and not expert
        self.group = parallel_state.get_tensor_model_parallel_group()
        options = {"dtype": config.params_dtype, "device": devices.device()}
        rows = {part.name: sum(count for _, count in part.blocks) for part in parts}
        # ParameterDict sorts a plain dict by name
        in_a = [(part.name, torch.empty(rank, inputs, **options)) for part in parts]
        in_b = [(name, torch.empty(count, rank, **options)) for name, count in rows.items() if count]
        self.A, self.B = (torch.nn.ParameterDict(collections.OrderedDict(tensors)) for tensors in (in_a, in_b))
        # B's rows, one part after the other, belong to these outputs, and to these channels of A x
        places = [row for part in parts for first, count in part.blocks for row in range(first, first + count)]
        owners = [i for i, part in enumerate(parts) for _ in range(rows[part.name])]
        self.in_order = len(parts) == 1 and places == list(range(outputs))
        for name, indices in (("place", places), ("owner", owners)) if not self.in_order else ():
            indices = torch.tensor(indices, dtype=torch.int64, device=devices.device())
            self.register_buffer(name, indices, persistent=False)
        for parameter in self.A.values():
            self._mark(parameter, divided=split == "row", dim=1, config=config)
        for parameter in self.B.values():
            self._mark(parameter, divided=split == "column", dim=0, config=config)

    def _mark(self, parameter: torch.nn.Parameter, *, divided: bool, dim: int, config: TransformerConfig) -> None:
        """Tells megatron about a parameter: the ranks with the same one, and the ranks that sum its gradient."""
        # read by: param_is_not_tensor_parallel_duplicate, for the gradient's norm
        parameter.tensor_model_parallel = divided or self.expert
        parameter.partition_dim, parameter.partition_stride = (dim if divided else -1), 1
        # finalize_model_grads sums it over tensor-parallel ranks
        parameter.sequence_parallel = self.sp and not divided
        # DistributedDataParallel reduces it over replicas of experts
        parameter.allreduce = not (self.expert and config.expert_model_parallel_size > 1)
        if self.expert and not divided and parallel_state.get_expert_tensor_parallel_world_size() > 1:
            parameter.sum_over_experts_tp = True
            # param_is_not_shared: the gradient's norm counts it on one rank
            parameter.shared = parallel_state.get_expert_tensor_parallel_rank() > 0

    def forward(self, x: Tensor) -> Tensor:
        """Returns what is added to the linear's output, of the shape that the linear gives for its input `x`."""
        low = self._low(x)
        if self.split == "column" and not self.expert:
            if self.sp:
                low = gather_from_sequence_parallel_region(low, group=self.group)
            elif self.group.size() > 1:
                low = copy_to_tensor_model_parallel_region(low, group=self.group)
        elif self.split == "row" and not self.expert:
            if self.sp:
                low = reduce_scatter_to_sequence_parallel_region(low, group=self.group)
            elif self.group.size() > 1:
                low = reduce_from_tensor_model_parallel_region(low, group=self.group)
        return F.linear(low * self.scale, self._up())

    def local(self, x: Tensor) -> Tensor:
        """Returns [..., O] of x [..., I] on this rank alone; for a row-parallel linear it is a part of the sum over
        ranks."""
        return F.linear(self._low(x) * self.scale, self._up())

    @torch.no_grad()
    def merged_weight(self, weight: Tensor) -> Tensor:
        """Returns this rank's [O, I] of W + scale * B A, summed in fp32, in the dtype of `weight`: a new tensor."""
        delta = self._up().float() @ torch.cat(list(self.A.values())).float()
        return delta.mul_(self.scale).add_(weight).to(weight.dtype)

    def _low(self, x: Tensor) -> Tensor:
        """Returns A x, [..., P * R]; each adapter drops inputs of its own."""
        if not (self.dropout and self.training):
            return F.linear(x, torch.cat(list(self.A.values())))
        return torch.cat([F.linear(self._dropped(x), a) for a in self.A.values()], dim=-1)

    def _dropped(self, x: Tensor) -> Tensor:
        """Drops the same inputs on tensor-parallel ranks that have the same ones."""
        if self.group.size() > 1 and (self.sp or self.split == "row"):
            with get_cuda_rng_tracker().fork():
                return F.dropout(x, self.dropout)
        return F.dropout(x, self.dropout)

    def _up(self) -> Tensor:
        """Returns [O, P * R]. A row has B of its adapter, at that adapter's channels, and zeros elsewhere."""
        if self.in_order:
            return next(iter(self.B.values()))
        parts = len(self.A)
        rank = next(iter(self.A.values())).shape[0]
        whole = self.place.new_zeros(self.outputs, parts, rank, dtype=next(iter(self.A.values())).dtype)
        if not self.B:
            return whole.flatten(1)
        return whole.index_put((self.place, self.owner), torch.cat(list(self.B.values()))).flatten(1)


class GroupedAdapter(torch.nn.ModuleList):
    """Holds the adapters of transformer-engine's grouped linear, which has all experts of a rank: one each, in order.

    An expert's parameters are `E.A.name` and `E.B.name`. Each expert has a product of its own: a grouped product of
    torch's wants token counts in multiples of eight, and nothing here makes them so.
    """

    @property
    def enabled(self) -> bool:
        return all(adapter.enabled for adapter in self)

    def forward(self, x: Tensor, splits: Sequence[int]) -> Tensor:
        """Returns [T, O] of x [T, I]: the first `splits[0]` tokens are the first expert's, and so on."""
        assert len(splits) == len(self), f"token counts of {len(splits)} experts for adapters of {len(self)}"
        parts = [adapter(part) for adapter, part in zip(self, x.split(list(splits)), strict=True)]
        return torch.cat(parts)


def attach_to_expert(module: torch.nn.Module, expert: int, adapter: Adapter) -> None:
    """Makes a grouped linear add the output of `adapter` to that of its expert.

    expert: its number on this rank. Experts come in order.
    """
    if NAME not in module._modules:
        module.add_module(NAME, GroupedAdapter())
        module.register_forward_hook(_add)
    assert len(module.adapter) == expert, f"adapter of expert {expert} after those of {len(module.adapter)}"
    module.adapter.append(adapter)


def adapter_of(module: torch.nn.Module, parameter: str) -> Adapter | None:
    """Returns the adapter over a parameter of `module`, by its name there: `weight`, `weight3` of a grouped linear."""
    adapter = module._modules.get(NAME)
    if isinstance(adapter, GroupedAdapter):
        return adapter[int(parameter.removeprefix("weight"))] if parameter.startswith("weight") else None
    return adapter if parameter in ("weight", "gate_weight") else None


def attach(module: torch.nn.Module, adapter: Adapter) -> None:
    """Makes `module` add the adapter's output: to its own, a router to its logits, shared experts to their gate."""
    module.add_module(NAME, adapter)
    if isinstance(module, SharedExpertMLP):
        module.forward = functools.partial(_gated, module)
    elif not isinstance(module, Router):  # `mrl.mcore_models.router.Router` asks for it
        module.register_forward_hook(_add)


def adapter_output(module: torch.nn.Module, x: Tensor) -> Tensor | float:
    """Returns the output of `module`'s adapter for `x`; 0 if it has none, or it is off."""
    adapter = module._modules.get(NAME)
    return adapter(x) if adapter is not None and adapter.enabled else 0.0


def add_adapter_output(module: torch.nn.Module, x: Tensor, out: Tensor) -> Tensor:
    """Returns `out`, the linear's output for `x` on this rank alone, with its adapter's part (`Adapter.local`)."""
    adapter = module._modules.get(NAME)
    return out + adapter.local(x) if adapter is not None and adapter.enabled else out


def _add(module: torch.nn.Module, args: tuple, output: Tensor | tuple) -> Tensor | tuple | None:
    """Adds the adapter's output, as the hook after a linear's forward."""
    if not module.adapter.enabled:
        return None
    if isinstance(module.adapter, GroupedAdapter):
        added = module.adapter(*args)  # the tokens and their counts
    else:
        added = module.adapter(_normed(module, args[0]))
    if isinstance(output, tuple):  # megatron's linears give a bias beside
        return (output[0] + added, *output[1:])
    return output + added


def _gated(module: SharedExpertMLP, hidden_states: Tensor) -> Tensor:
    """Runs SharedExpertMLP.forward with an adapter of its gate."""
    output, _ = MLP.forward(module, hidden_states)
    return output * torch.sigmoid(F.linear(hidden_states, module.gate_weight) + adapter_output(module, hidden_states))


def _normed(module: torch.nn.Module, x: Tensor) -> Tensor:
    """Returns the linear's input: transformer-engine fuses some of them with the RMSNorm before."""
    weight = getattr(module, "layer_norm_weight", None)
    if weight is None:
        return x
    factor = weight.float() + 1 if module.zero_centered_gamma else weight.float()
    return F.rms_norm(x.float(), weight.shape, factor, module.eps).to(x.dtype)


def needs_gradient(model: torch.nn.Module) -> None:
    """Makes hidden states ask for a gradient after frozen embeddings.

    Without one, recomputed layers and the schedules of pipelines take no gradient further.
    """

    def ask(module: torch.nn.Module, args: tuple, output: Tensor) -> None:
        if torch.is_grad_enabled() and not output.requires_grad:
            output.requires_grad_()

    if model.pre_process:
        model.embedding.register_forward_hook(ask)


def adapters_of(model: torch.nn.Module) -> Iterable[Adapter]:
    """Returns every adapter of a model chunk."""
    return (module for module in model.modules() if isinstance(module, Adapter))


def without_gradient(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yields each A whose B, as this rank has it, is zero: B is a factor in the gradient of A."""
    for adapter in adapters_of(model):
        yield from (a for name, a in adapter.A.items() if name not in adapter.B or not adapter.B[name].any())


def sum_over_experts_tp(models: Iterable[torch.nn.Module]) -> None:
    """Sums gradients that are parts over the ranks of one expert. Call it before they are reduced over data."""
    group = parallel_state.get_expert_tensor_parallel_group(check_initialized=False)
    if group is None or group.size() == 1:
        return
    for model in models:
        gradients = [p.main_grad for p in model.parameters() if getattr(p, "sum_over_experts_tp", False)]
        if gradients:
            flat = torch.cat([g.reshape(-1) for g in gradients])
            dist.all_reduce(flat, group=group)
            for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(summed.view_as(gradient))
