"""Balances mixtures of experts on tensors without memory: experts get equal numbers of tokens, to one.

megatron's token dispatchers read on the host how many tokens go to each expert. Tensors on the meta device have no
values, so the numbers come from here. They are the same on every rank, as from a router that balances perfectly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from mrl import patches


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
