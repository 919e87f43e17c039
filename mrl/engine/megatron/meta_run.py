"""Runs tensors without memory as a GPU would run them, and counts what they cost.

Experts get equal numbers of tokens, to one. megatron's token dispatchers read these numbers on the host, and tensors on
the meta device have no values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from mrl import patches
from mrl.engine.peak_bytes import PeakBytes

BLOCK = 512  # CUDA's caching allocator rounds tensors up to multiples of so many bytes


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Holds the bytes that a rank gives to collectives of one kind."""

    group: str  # the ranks that take part: tp, cp, ep, ...
    op: str  # all_reduce, all_gather, reduce_scatter, all_to_all
    ranks: int
    bytes: int  # of the whole tensor: an all-gather's output, the input of others


_OPS = {
    "allreduce_": "all_reduce", "allgather_": "all_gather", "_allgather_base_": "all_gather",
    "reduce_scatter_": "reduce_scatter", "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_": "all_to_all", "alltoall_base_": "all_to_all", "broadcast_": "broadcast",
}  # fmt: skip


class CostCounter(PeakBytes):
    """Counts bytes, FLOPs and the traffic of collectives."""

    def __init__(self, groups: Mapping[str, str]) -> None:
        super().__init__("meta", block=BLOCK)
        self.groups = groups
        self.flops = 0.0
        self.traffic: dict[tuple[str, str, int], int] = {}

    def take_counts(self) -> tuple[float, tuple[Traffic, ...]]:
        """Returns FLOPs and traffic since the last call."""
        flops, traffic = self.flops, tuple(Traffic(*key, count) for key, count in sorted(self.traffic.items()))
        self.flops, self.traffic = 0.0, {}
        return flops, traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        packet = func._overloadpacket
        if func.namespace == "c10d":
            self._note_collective(func, out, args, kwargs or {})
        elif packet.__name__ in _ATTENTION:
            self.flops += _attention_flops(func, args, kwargs or {})
        elif packet.__name__ == "_grouped_mm":  # of rows of experts [T, I], or of such rows' gradients [O, T]
            self.flops += 2.0 * args[0].numel() * args[1].shape[-1]
        elif packet in flop_registry:
            given = [one for one in args if not isinstance(one, torch.dtype)]  # a product's, of a sum in another one
            self.flops += flop_registry[packet](*given, **(kwargs or {}), out_val=out)
        return out

    def _note_collective(self, func: Any, out: Any, args: Any, kwargs: Any) -> None:
        from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops

        name = func._schema.name.removeprefix("c10d::")
        if func not in collective_ops or func in sync_ops or name not in _OPS:
            return
        group = CollectiveOp.get_process_group(func, args)
        kind = self.groups.get(group.group_name, group.group_name)
        key = (kind, _OPS[name], group.size())
        # other operators take outputs, then inputs; the whole tensor is the output of a gather, the input of a scatter
        in_place = _OPS[name] in ("all_reduce", "broadcast")
        size = _bytes_of(args[0] if in_place else (args[0], args[1]))
        self.traffic[key] = self.traffic.get(key, 0) + size


def _bytes_of(tensors: Any) -> int:
    """Returns bytes of the larger of an operation's inputs and outputs."""
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    if isinstance(tensors, tuple):
        return max(_bytes_of(one) for one in tensors)
    return sum(_bytes_of(one) for one in tensors)


_ATTENTION = {  # operator -> index of its queries, whether heads come before positions, products of queries and keys
    "_scaled_dot_product_flash_attention": (0, True, 2), "_scaled_dot_product_flash_attention_backward": (1, True, 5),
    "_scaled_dot_product_efficient_attention": (0, True, 2),
    "_scaled_dot_product_efficient_attention_backward": (1, True, 5),
    "_flash_attention_forward": (0, False, 2), "_flash_attention_backward": (1, False, 5),
    "packed_attention": (0, False, 2), "packed_attention_backward": (1, False, 5),
}  # fmt: skip


def _attention_flops(func: Any, args: Any, kwargs: Mapping[str, Any]) -> float:
    """Returns FLOPs of an attention kernel: two products over the pairs of queries and keys that see each other.

    The backward pass has five, because it makes the scores again.
    """
    first, heads_first, products = _ATTENTION[func._overloadpacket.__name__]
    named = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
    q, k, v = args[first : first + 3]
    if q.dim() == 3:  # packed: what is computed depends on lengths that shapes do not tell; as if all were equal
        pairs = q.shape[0] ** 2 / (named["cu_seqlens"].shape[0] - 1) / 2
        return products * pairs * q.shape[1] * (q.shape[-1] + v.shape[-1])
    heads, queries = (q.shape[1], q.shape[2]) if heads_first else (q.shape[2], q.shape[1])
    keys = k.shape[2] if heads_first else k.shape[1]
    seen = keys - queries / 2 if named.get("is_causal") else keys
    window = named.get("window_size_left")
    if window is not None and window >= 0:
        seen = min(seen, window + 1)
    return products * q.shape[0] * heads * queries * seen * (q.shape[-1] + v.shape[-1])


_ASKED = {
    torch.nn.functional.scaled_dot_product_attention, torch.Tensor.tolist, torch.Tensor.numpy,
    torch.Tensor.masked_select, torch.masked_select, torch.Tensor.nonzero, torch.nonzero,
}  # fmt: skip


class GPUKernelChoice(TorchFunctionMode):
    """Chooses attention's kernel as torch does on a GPU, and answers the host's reads of tensors without memory."""

    def __init__(self, experts: EvenExperts) -> None:
        super().__init__()
        self.experts = experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _ASKED:
            return func(*args, **kwargs)
        if func is torch.nn.functional.scaled_dot_product_attention and args[0].is_meta:
            return attention(*args, **kwargs)
        if args and isinstance(args[0], Tensor) and args[0].is_meta:
            if func in (torch.Tensor.tolist, torch.Tensor.numpy):
                caller = sys._getframe(1).f_code.co_name
                found = self.experts.numbers(args[0], caller)
                assert found is not None, f"{caller} reads a tensor of {tuple(args[0].shape)}, which has no numbers"
                return found
            if func in (torch.Tensor.masked_select, torch.masked_select):
                return args[0].broadcast_to(args[1].shape).flatten()[: self._selected(args[1])].clone()
            if func in (torch.Tensor.nonzero, torch.nonzero):
                return args[0].new_empty(self._selected(args[0]), args[0].dim(), dtype=torch.int64)
        return func(*args, **kwargs)

    def _selected(self, mask: Tensor) -> int:
        count = self.experts.selected(mask)
        if count is None and mask.dim() == 1:  # a loss mask: in a plan all tokens train
            return mask.numel()
        assert count is not None, f"places of a mask of {tuple(mask.shape)} are counted, and it has no numbers"
        return count


@contextlib.contextmanager
def keep_mode_in_backward(experts: EvenExperts) -> Iterator[None]:
    """Keeps the function mode in backward passes inside.

    torch takes a mode off while it runs a call that the mode handled, also for backward passes. A recomputed forward
    within them would run without it.
    """
    run = torch.autograd.graph._engine_run_backward

    def backward(*args: Any, **kwargs: Any) -> Any:
        with GPUKernelChoice(experts):
            return run(*args, **kwargs)

    with patches.replaced(
        {"torch.autograd:_engine_run_backward": backward, "torch.autograd.graph:_engine_run_backward": backward}
    ):
        yield


def attention(q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
              scale: float | None = None, enable_gqa: bool = False) -> Any:  # fmt: skip
    """Runs `scaled_dot_product_attention` with the kernel that torch takes on a GPU; a CPU build does not choose it.

    The rules are those of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, without cuDNN's kernel, which has
    flash's shapes. Flash takes no mask and no fp32. The memory-efficient one takes no groups of queries. Otherwise the
    whole matrix is made.
    """
    aten = torch.ops.aten
    if (
        attn_mask is None
        and q.dtype != torch.float32
        and max(q.shape[-1], v.shape[-1]) <= 256
        and q.shape[-1] == v.shape[-1]
    ):
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
    if not enable_gqa:
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, -torch.inf)
        bias = None if attn_mask is None else attn_mask.expand(*q.shape[:-1], k.shape[-2])
        return aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, dropout_p, is_causal, scale=scale)[0]
    return aten._scaled_dot_product_attention_math(
        q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


class _FusedNorm(torch.autograd.Function):
    """Keeps for the backward pass what a fused norm keeps, as shapes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


@contextlib.contextmanager
def norms_of(spec: str) -> Iterator[None]:
    from mrl.mcore_models.layers import RMSNorm

    forward = RMSNorm.forward
    if spec == "te":
        RMSNorm.forward = lambda self, x: _FusedNorm.apply(x, self.weight)  # type: ignore[method-assign]
    try:
        yield
    finally:
        RMSNorm.forward = forward  # type: ignore[method-assign]


class EvenExperts:
    """Gives a rank's dispatchers the numbers that they read of tensors without memory.

    real: makes a tensor with values from a list. waited: called when the host would wait for a GPU.
    """

    def __init__(self, real: Callable[[Any], Tensor], waited: Callable[[str], None]) -> None:
        self._real, self._waited = real, waited
        self.dispatcher: Any = None  # the last one that preprocessed tokens
        self.tokens = 0  # its tokens on this rank

    def counts(self) -> list[int]:
        """Returns this rank's tokens for each expert of the model."""
        config = self.dispatcher.config
        if config.moe_pad_expert_input_to_capacity:
            return [self.dispatcher.capacity] * config.num_moe_experts
        each, more = divmod(self.tokens * config.moe_router_topk, config.num_moe_experts)
        return [each + (i < more) for i in range(config.num_moe_experts)]

    def here(self) -> list[int]:
        """Returns the tokens of all ranks for each of this rank's experts."""
        at = self.dispatcher
        return [self.counts()[i] * at.tp_size * at.ep_size for i in at.local_expert_indices]

    def selected(self, mask: Tensor) -> int | None:
        """Returns how many positions of a dispatcher's mask are set; None for any other mask."""
        if self.dispatcher is None or mask.dim() != 2:
            return None
        gathers = type(self.dispatcher).__name__ == "MoEAllGatherTokenDispatcher"
        return sum(self.here()) if gathers else sum(self.counts())

    def numbers(self, tensor: Tensor, caller: str) -> list[int] | None:
        """Returns the values of a dispatcher's tensor for the function `caller` that reads it; None for any other
        tensor."""
        at, size = self.dispatcher, tuple(tensor.shape)
        if at is None:
            return None
        if caller == "sort_chunks_by_idxs":  # moe_utils calls tolist on the order and on the sizes of chunks
            if tensor is at.sort_input_by_local_experts or tensor is at.restore_output_by_local_experts:
                return list(range(*size))
            return [n // (at.tp_size * at.ep_size) for n in self.here()] * (at.tp_size * at.ep_size)
        return self.here() if size == (len(at.local_expert_indices),) else None

    def install(self) -> Callable[[], object]:
        """Replaces the methods of megatron's dispatchers that copy these numbers to the host. Returns a function that
        undoes it."""
        from megatron.core.transformer.moe import token_dispatcher

        alltoall, gather = token_dispatcher.MoEAlltoAllTokenDispatcher, token_dispatcher.MoEAllGatherTokenDispatcher
        path = token_dispatcher.__name__
        before = patches.replace(
            {
                f"{path}:MoEAlltoAllTokenDispatcher.dispatch_preprocess": self._noting(alltoall.dispatch_preprocess),
                f"{path}:MoEAllGatherTokenDispatcher.dispatch_preprocess": self._noting(gather.dispatch_preprocess),
                f"{path}:MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize": self._to_host(),
            }
        )
        return lambda: patches.replace(before)

    def _noting(self, method: Any) -> Any:
        def dispatch_preprocess(at: Any, hidden: Any, routing_map: Any, probs: Any) -> Any:
            self.dispatcher, self.tokens = at, routing_map.shape[0]
            return method(at, hidden, routing_map, probs)

        return dispatch_preprocess

    def _to_host(self) -> Any:
        def _maybe_dtoh_and_synchronize(at: Any, point: str, tokens_per_expert: Any = None) -> Any:
            if point == at.cuda_dtoh_point and at.cuda_sync_point != "no_sync":
                counts, per, ranks = self.counts(), len(at.local_expert_indices), at.tp_size * at.ep_size
                mine = [counts[i] for i in at.local_expert_indices]
                if ranks > 1:
                    at.input_splits = np.array([sum(counts[i * per : (i + 1) * per]) for i in range(at.ep_size)])
                    at.output_splits = np.array([sum(mine)] * at.ep_size)
                    at.output_splits_tp = np.array([sum(mine) * at.ep_size] * at.tp_size)
                if per > 1:
                    at.num_global_tokens_per_local_expert = self._real([mine] * ranks)
                tokens_per_expert = self._real(self.here())
            if point == at.cuda_sync_point:
                self._waited("d2h_event.synchronize")
            return tokens_per_expert

        return _maybe_dtoh_and_synchronize
