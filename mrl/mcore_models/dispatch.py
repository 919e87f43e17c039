"""Permutes tokens to experts and back in a repeatable order, without waiting for the host.

megatron-core adds the outputs of a token's experts by atomic additions, and in the backward pass the gradients of its
copies (`scatter_add_`, and `index_add_` behind `index_select`; moe_utils.py). On a GPU their order changes from run to
run. With more than two experts a token, neither a forward pass nor a gradient is repeatable.

Here one thread makes the sum of a row, in the order of experts and in fp32. A token's rows are computed on the device;
0.16.1 asks the host how many there are. Both it and 0.19.2 then sort rows again that are sorted already if one rank has
all experts.

On a GPU Triton's kernels do each step, else torch's operators. The bits are the same.

Kernels of transformer-engine (`moe_permute_fusion`), experts that may be full (`moe_expert_capacity_factor`) and other
dispatchers (`moe_token_dispatcher_type`) stay as they are.

Dimensions: `T` tokens of a rank, `K` experts of each, `E` experts, `R` = T * K rows, `H` a row's width.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mrl import patches
from mrl.kernels import operators
from mrl.kernels import routes as kernels


def install() -> None:
    """Makes megatron-core's all-to-all dispatcher permute by `CopyToRows` and `SumOfRows`, while the process lives."""
    patches.check(__name__)
    path = "megatron.core.transformer.moe.token_dispatcher"
    module: Any = importlib.import_module(path)
    preprocess, unpermute = module.MoEAlltoAllTokenDispatcher.dispatch_preprocess, module.unpermute

    def dispatch_preprocess(self: Any, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> Any:
        """Does what megatron-core's does. hidden_states [..., H], routing_map and probs [T, E]; returns rows [R, H] and
        their probabilities [R]."""
        # the lines of megatron-core's method (0.16.1 and 0.19.2) around its call of `permute`
        config = self.config
        fixed = self.drop_and_pad or config.moe_expert_capacity_factor is not None
        if fixed or config.moe_permute_fusion:
            return preprocess(self, hidden_states, routing_map, probs)
        self.hidden_shape, self.routing_map, self.probs = hidden_states.shape, routing_map, probs
        tokens = hidden_states.view(-1, self.hidden_shape[-1])
        self.hidden_shape_before_permute = tokens.shape
        counts = self.preprocess(routing_map)
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", counts)
        self.reversed_local_input_permutation_mapping = routes = Routes.of(routing_map, config.moe_router_topk)
        return CopyToRows.apply(tokens, routes.rows, routes.choices), routes.of_rows(probs)

    def unpermuted(permuted: Tensor, mapping: Any, *args: Any, **named: Any) -> Tensor:
        if not isinstance(mapping, Routes):
            return unpermute(permuted, mapping, *args, **named)
        return SumOfRows.apply(permuted, mapping.rows, mapping.choices)

    patches.replace(
        {
            f"{path}:MoEAlltoAllTokenDispatcher.dispatch_preprocess": dispatch_preprocess,
            f"{path}:unpermute": unpermuted,
        }
    )


def keep_sorted(model: torch.nn.Module) -> None:
    """Leaves out megatron-core's second sort if one rank has all experts: rows are sorted by expert since the
    permutation.

    The sort copies all rows each way.
    """
    for module in model.modules():
        dispatcher = getattr(module, "token_dispatcher", None)
        if dispatcher is not None and is_of_one_rank(dispatcher):
            # dispatch_postprocess and combine_preprocess sort only `if self.num_local_experts > 1`
            dispatcher.num_local_experts = 1


def is_of_one_rank(dispatcher: Any) -> bool:
    """Returns whether a layer's dispatcher sends nothing, and gives experts as many rows as tokens ask for."""
    alltoall = type(dispatcher).__name__ == "MoEAlltoAllTokenDispatcher"
    return alltoall and dispatcher.tp_size * dispatcher.ep_size == 1 and not dispatcher.drop_and_pad


def keep_counts_on_device(dispatcher: Any) -> None:
    """Makes a dispatcher leave the experts' row counts on the device. `is_of_one_rank` must hold for it."""
    dispatcher._maybe_dtoh_and_synchronize = lambda point, tokens_per_expert=None: tokens_per_expert


@dataclasses.dataclass(frozen=True)
class Routes:
    """Maps tokens to rows and back. Rows are sorted by expert, and those of an expert by token."""

    rows: Tensor  # [T, K] of each token, in the order of its experts
    choices: Tensor  # [R] of each row: the place in [T, K], as one row of numbers, that it has there
    places: Tensor  # [R] of each row: the place of its token and expert in [T, E], as one row of numbers

    @classmethod
    def of(cls, routing_map: Tensor, chosen: int) -> Routes:
        """Returns the routes of routing_map [T, E], which says whether a token goes to an expert: to `chosen` of them
        each."""
        if operators.uses_triton(routing_map):
            return cls(*kernels.find_routes(routing_map, chosen))
        tokens, experts = routing_map.shape
        before = routing_map.T.reshape(-1).cumsum(0).view(experts, tokens).T - 1  # [T, E]
        none = tokens * chosen  # behind all rows
        rows, of = torch.where(routing_map, before, none).topk(chosen, dim=1, largest=False)
        choices = torch.arange(tokens * chosen, device=rows.device)
        choices = torch.empty_like(choices).scatter_(0, rows.flatten(), choices)
        return cls(rows, choices, choices // chosen * experts + of.flatten()[choices])

    def of_rows(self, probs: Tensor) -> Tensor:
        """Returns the probabilities [R] of rows, from probs [T, E]."""
        return Selected.apply(probs, self.places)


class Selected(torch.autograd.Function):
    """Selects x.flatten()[places], of different places."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.shape = x.shape
        return x.flatten().index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape.numel()).index_copy_(0, places, grad).view(ctx.shape), None


class CopyToRows(torch.autograd.Function):
    """Copies x[t] [T, H] to each of its rows, [R, H]. A gradient is the sum over a token's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, choices: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return copy_to_rows(x, choices, rows.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return sum_of_rows(grad, rows), None, None


class SumOfRows(torch.autograd.Function):
    """Sums a token's rows, y [R, H] -> [T, H]. A gradient is copied to each of them."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, rows: Tensor, choices: Tensor) -> Tensor:
        ctx.chosen = rows.shape[1]
        ctx.save_for_backward(choices)
        return sum_of_rows(y, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (choices,) = ctx.saved_tensors
        return copy_to_rows(grad, choices, ctx.chosen), None, None


def copy_to_rows(x: Tensor, choices: Tensor, chosen: int) -> Tensor:
    """Returns x[choices // chosen] [R, H] of x [T, H]."""
    if operators.uses_triton(x):
        return kernels.copy_rows(x, choices, chosen)
    return x.index_select(0, choices // chosen)


def sum_of_rows(y: Tensor, rows: Tensor) -> Tensor:
    """Returns sum_k y[rows[t, k]] [T, H] of y [R, H] and rows [T, K]; terms in this order, added in fp32.

    The kernel of `embedding_bag` has a thread for each sum, and makes no copy of the rows.
    """
    if operators.uses_triton(y):
        return kernels.sum_rows(y, rows)
    if rows.shape[1] == 1:
        return y.index_select(0, rows.flatten())
    return F.embedding_bag(rows, y.contiguous(), mode="sum")
