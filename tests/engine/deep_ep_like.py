"""DeepEP's `Buffer` over the processes' own all-to-all: what megatron-core's flex dispatcher asks of it, on CPUs.

DeepEP needs GPUs. Of it stand here what its README says of dispatch and combine in normal mode: a token goes once to
each rank that has experts of it, with the places of these in that rank, else -1; combine adds what comes back for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.config.schema import RoleConfig
from tests.engine import padding


@dataclasses.dataclass(frozen=True)
class Handle:
    """Which tokens went where, for the way back."""

    tokens: int
    sent: list[Tensor]  # to each rank, indices of its tokens
    received: list[int]  # from each rank, numbers of tokens


class Buffer:
    calls = 0

    def __init__(self, group: Any, nvl_bytes: int, rdma_bytes: int) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, nvl_bytes, rdma_bytes

    @staticmethod
    def set_num_sms(count: int) -> None:
        assert count > 0

    @staticmethod
    def get_dispatch_config(ranks: int) -> Any:
        return types.SimpleNamespace(
            get_nvl_buffer_size_hint=lambda hidden, ranks: hidden * ranks,
            get_rdma_buffer_size_hint=lambda hidden, ranks: 0,
        )

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int, **how: Any) -> tuple[Any, ...]:
        per_rank = num_experts // self.group.size()
        in_rank = torch.stack([(topk_idx // per_rank == rank).any(1) for rank in range(self.group.size())], 1)
        return in_rank.sum(0), None, torch.bincount(topk_idx.flatten(), minlength=num_experts), in_rank, Event()

    def dispatch(
        self, x: Tensor, handle: Handle | None = None, topk_idx: Tensor | None = None, topk_weights: Tensor | None = None,
        is_token_in_rank: Tensor | None = None, num_tokens_per_expert: Tensor | None = None, **how: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        if handle is not None:
            return self._there(x, handle), None, None, None, handle, Event()
        assert topk_idx is not None and topk_weights is not None and topk_weights.dtype == torch.float32
        assert is_token_in_rank is not None and num_tokens_per_expert is not None
        Buffer.calls += 1
        per_rank = len(num_tokens_per_expert) // self.group.size()
        sent = [column.nonzero().flatten() for column in is_token_in_rank.T]
        counts = torch.tensor([len(tokens) for tokens in sent])
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.group)
        made = Handle(len(x), sent, received.tolist())
        everyone = torch.cat([torch.full_like(tokens, rank) for rank, tokens in enumerate(sent)])
        places = topk_idx[torch.cat(sent)] - per_rank * everyone[:, None]
        here = (places >= 0) & (places < per_rank)
        places = self._exchange(places.masked_fill(~here, -1), counts.tolist(), made.received)
        weights = self._exchange((topk_weights[torch.cat(sent)] * here).contiguous(), counts.tolist(), made.received)
        of_experts = torch.bincount(places[places >= 0], minlength=per_rank).tolist()
        return self._there(x, made), places, weights, of_experts, made, Event()

    def combine(self, x: Tensor, handle: Handle, topk_weights: Tensor | None = None, **how: Any) -> tuple[Any, ...]:
        weights = None if topk_weights is None else self._back(topk_weights, handle)
        return self._back(x, handle), weights, Event()

    def _there(self, x: Tensor, handle: Handle) -> Tensor:
        return self._exchange(x[torch.cat(handle.sent)], list(map(len, handle.sent)), handle.received)

    def _back(self, x: Tensor, handle: Handle) -> Tensor:
        came = self._exchange(x.contiguous(), handle.received, list(map(len, handle.sent)))
        return x.new_zeros(handle.tokens, x.shape[1]).index_add_(0, torch.cat(handle.sent), came)

    def _exchange(self, x: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        found = x.new_empty(sum(receives), *x.shape[1:])
        dist.all_to_all_single(found, x.contiguous(), receives, sends, group=self.group)
        return found


class Event:
    def __init__(self, handle: Any = None) -> None: ...

    def current_stream_wait(self) -> None: ...


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """megatron-core finds it, in this process."""
    package, utils = types.ModuleType("deep_ep"), types.ModuleType("deep_ep.utils")
    package.__spec__ = importlib.machinery.ModuleSpec("deep_ep", None)
    package.Buffer, utils.EventHandle, utils.EventOverlap = Buffer, Event, Event
    way: Any = importlib.import_module("megatron.core.transformer.moe.fused_a2a")
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    names = ("fused_dispatch", "fused_combine", "set_deepep_num_sms")
    sys.modules |= {"deep_ep": package, "deep_ep.utils": utils}
    try:
        importlib.reload(way)
        for name in names:
            setattr(dispatcher, name, getattr(way, name))
        yield
    finally:
        del sys.modules["deep_ep"], sys.modules["deep_ep.utils"]
        importlib.reload(way)
        for name in names:
            setattr(dispatcher, name, getattr(way, name))


def with_keys(config: RoleConfig, keys: dict[str, Any]) -> dict[str, float]:
    """As of `padding`; and `calls`, how often tokens went by DeepEP."""
    before = Buffer.calls
    with installed():
        found = padding.with_keys(config, keys)
    return found | {"calls": Buffer.calls - before}
