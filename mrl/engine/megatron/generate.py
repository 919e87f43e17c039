"""Greedy generation from the engine's own weights, with a KV cache, under any tensor and pipeline layout.

Requests run in groups that the cache has room for. The first forward of a group takes all prompts end to end (prefill),
each later one a token of every sequence that is not finished. Ranks of one replica work together; each
data-parallel and context-parallel replica takes a share of the requests, except where experts are spread over replicas
and all must take part in every forward: there each takes all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from mrl.engine.base import Completion, GenerateRequest
from mrl.mcore_models import platform
from mrl.mcore_models.attention import CacheLayout, SdpaAttention

if TYPE_CHECKING:
    from mrl.engine.megatron.engine import MegatronEngine

CACHE_TOKENS = 65536
"""Tokens whose keys and values are kept at once, over the sequences of a group."""


@dataclasses.dataclass
class _Sequence:
    request: GenerateRequest
    index: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    log_probs: list[float] = dataclasses.field(default_factory=list)
    finished: bool = False

    @property
    def done(self) -> bool:
        return self.finished or len(self.tokens) >= self.request.max_new_tokens


def run(engine: "MegatronEngine", requests: Sequence[GenerateRequest]) -> list[Completion]:
    """Completions in the order of the requests, on every rank."""
    sequences = [_Sequence(request, i) for i, request in enumerate(requests)]
    replicas = engine.dims.dp * engine.dims.cp
    shared = replicas == 1 or engine.dims.experts_span_replicas
    replica = engine.coords.dp_rank * engine.dims.cp + engine.coords.cp_rank
    mine = sequences if shared else sequences[replica::replicas]
    with contextlib.nullcontext() if engine.spec == "local" else _own_attention(engine):
        for group in _groups(mine):
            _generate(engine, group)
    if not shared:
        everyone: list[list[_Sequence]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine)
        sequences = sorted({s.index: s for part in everyone for s in part}.values(), key=lambda s: s.index)
    return [Completion(s.tokens, s.log_probs, s.finished) for s in sequences]


@contextlib.contextmanager
def _own_attention(engine: "MegatronEngine") -> Iterator[None]:
    """Core attention that knows `CacheLayout`, in place of transformer-engine's; neither has parameters."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    attentions = [layer.self_attention for model in engine.models for layer in model.decoder.layers]
    replaced = [attention.core_attention for attention in attentions]
    for attention in attentions:
        own = SdpaAttention(engine.model_config, attention.layer_number, pg_collection=groups)
        attention.core_attention = own.eval()
    try:
        yield
    finally:
        for attention, core in zip(attentions, replaced, strict=True):
            attention.core_attention = core


def _groups(sequences: Sequence[_Sequence]) -> list[list[_Sequence]]:
    groups: list[list[_Sequence]] = []
    longest = 0
    for sequence in sequences:
        size = len(sequence.request.tokens) + sequence.request.max_new_tokens
        if groups and (len(groups[-1]) + 1) * max(longest, size) <= CACHE_TOKENS:
            groups[-1].append(sequence)
            longest = max(longest, size)
        else:
            groups.append([sequence])
            longest = size
    return groups


def _generate(engine: "MegatronEngine", group: list[_Sequence]) -> None:
    """Fills the sequences of one group. Finished ones stay in the batch, fed with their last token, until all are done."""
    limit = max(len(s.request.tokens) + s.request.max_new_tokens for s in group)
    caches = [dict() for _ in engine.models]
    new = [list(s.request.tokens) for s in group]
    cached = [0] * len(group)
    while not all(s.done for s in group):
        chosen, log_probs = _forward(engine, new, cached, limit, caches)
        cached = [min(old + len(tokens), limit - 1) for old, tokens in zip(cached, new, strict=True)]
        for sequence, token, log_prob in zip(group, chosen, log_probs, strict=True):
            if not sequence.done:
                sequence.tokens.append(token)
                sequence.log_probs.append(log_prob)
                sequence.finished = token in sequence.request.stop_tokens
        new = [[token] for token in chosen]


def _forward(
    engine: "MegatronEngine", new: list[list[int]], cached: list[int], limit: int, caches: list[dict]
) -> tuple[list[int], list[float]]:
    """One forward of all chunks in pipeline order. Returns each sequence's most probable next token and its log-prob."""
    dims, device = engine.dims, platform.device()
    flat = [token for tokens in new for token in tokens]
    positions = [old + i for tokens, old in zip(new, cached, strict=True) for i in range(len(tokens))]
    padding = -len(flat) % (dims.tp if dims.sp else 1)
    tokens = torch.tensor(flat + [0] * padding, device=device)
    at = torch.tensor(positions + [0] * padding, device=device)
    last = torch.tensor([len(t) for t in new], device=device).cumsum(0) - 1
    group = parallel_state.get_pipeline_model_parallel_group()
    ranks = dist.get_process_group_ranks(group)
    hidden, result = None, None
    for stage in range(dims.pp * dims.vpp):
        chunk, pp_rank = divmod(stage, dims.pp)
        if pp_rank == engine.coords.pp_rank:
            model = engine.models[chunk]
            layout = CacheLayout(
                qkv_format="sbhd", max_seqlen_q=limit, max_seqlen_kv=limit, new_lengths=tuple(len(t) for t in new),
                cached_lengths=tuple(cached), max_length=limit, positions=at, cache=caches[chunk],
            )  # fmt: skip
            if stage:
                model.set_input_tensor(_receive(engine, tokens.numel(), hidden, ranks, pp_rank))
            if model.post_process:
                model.output_layer.project = functools.partial(
                    _next_token, vocab_size=engine.hf["vocab_size"], last=last
                )
            hidden = model(tokens, layout, None)
            if model.post_process:
                result = hidden[0, : len(new)].double()
            elif dims.pp > 1:
                dist.send(hidden.contiguous(), ranks[(pp_rank + 1) % dims.pp], group=group)
    if dims.pp > 1:
        result = result if result is not None else torch.zeros(len(new), 2, dtype=torch.float64, device=device)
        dist.broadcast(result, ranks[-1], group=group)
    return result[:, 0].long().tolist(), result[:, 1].tolist()


def _receive(engine: "MegatronEngine", tokens: int, hidden: Tensor | None, ranks: list[int], pp_rank: int) -> Tensor:
    """The previous stage's hidden states; it is on this rank where there is one pipeline rank."""
    dims = engine.dims
    if dims.pp == 1:
        return hidden
    rows = tokens // dims.tp if dims.sp else tokens
    buffer = torch.empty(rows, 1, engine.hf["hidden_size"], dtype=engine.dtype, device=platform.device())
    dist.recv(buffer, ranks[(pp_rank - 1) % dims.pp], group=parallel_state.get_pipeline_model_parallel_group())
    return buffer


def _next_token(hidden: Tensor, weight: Tensor, *, vocab_size: int, last: Tensor) -> Tensor:
    """[S, 2] fp64: the most probable next token of each sequence and its log-prob. Ties go to the lower id.

    Each tensor-parallel rank finds the best of its columns and its part of the log-sum-exp; logits are not gathered.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    start = group.rank() * weight.shape[0]
    logits = torch.nn.functional.linear(hidden[last], weight).float()
    logits = logits[:, : max(0, min(weight.shape[0], vocab_size - start))]
    if logits.shape[1]:
        best, token = logits.max(dim=-1)
        part = torch.stack([best.double(), token.double() + start, logits.double().logsumexp(-1)], dim=-1)
    else:  # this rank holds padding rows only
        part = (
            torch.tensor([-torch.inf, 0.0, -torch.inf], dtype=torch.float64, device=hidden.device)
            .expand(last.numel(), 3)
            .contiguous()
        )
    parts = [torch.empty_like(part) for _ in range(group.size())]
    if group.size() > 1:
        dist.all_gather(parts, part, group=group)
    else:
        parts = [part]
    joined = torch.stack(parts)  # [tp, S, 3]
    owner = joined[..., 0].argmax(dim=0)
    rows = torch.arange(last.numel(), device=hidden.device)
    total = joined[..., 2].logsumexp(dim=0)
    return torch.stack([joined[owner, rows, 1], joined[owner, rows, 0] - total], dim=-1)
