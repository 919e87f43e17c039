"""Generation from the engine's own weights, with a KV cache, under any layout.

Ranks of one replica (tp, pp) work together on the same sequences; each data-parallel and context-parallel replica takes a
share of the requests. Where experts are spread over replicas all of them take part in every forward, and one that has
nothing left feeds a token that nothing comes of.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from mrl.engine.base import Completion, GenerateRequest
from mrl.engine.generation import DUMMY, Schedule, Step, check_room, share
from mrl.engine.logprobs import VocabShard
from mrl.engine.sampling import SamplingRows, choose
from mrl.mcore_models import platform
from mrl.mcore_models.attention import CacheLayout, SdpaAttention
from mrl.mcore_models.kv_cache import CachedStep, KVCache

if TYPE_CHECKING:
    from mrl.engine.megatron.engine import MegatronEngine


def run(
    engine: "MegatronEngine", requests: Sequence[GenerateRequest], *, cache_tokens: int, prefill_tokens: int
) -> list[Completion]:
    """Completions in the order of the requests, on every rank."""
    check_room(requests, cache_tokens)
    dims, coords = engine.dims, engine.coords
    replicas = dims.dp * dims.cp
    mine = share(len(requests), coords.dp_rank * dims.cp + coords.cp_rank, replicas)
    schedule = Schedule(
        [(i, requests[i]) for i in mine], cache_tokens=cache_tokens, prefill_tokens=prefill_tokens
    )  # fmt: skip
    caches = [KVCache(schedule.rows, schedule.length) for _ in engine.models]
    with contextlib.nullcontext() if engine.spec == "local" else _own_attention(engine):
        while _work_left(engine, not schedule.done):
            if schedule.done:
                _forward(engine, DUMMY, caches)
                continue
            step = schedule.next()
            schedule.take(step, *_forward(engine, step, caches))
    found = dict(schedule.completions())
    if replicas > 1:
        everyone: list[dict[int, Completion]] = [{}] * dist.get_world_size()
        dist.all_gather_object(everyone, found)
        found = {i: completion for part in everyone for i, completion in part.items()}
    return [found[i] for i in range(len(requests))]


def _work_left(engine: "MegatronEngine", here: bool) -> bool:
    return bool(engine.max_over_ranks(here)[0]) if engine.dims.experts_span_replicas else here


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


def _forward(engine: "MegatronEngine", step: Step, caches: list[KVCache]) -> tuple[list[int], list[float]]:
    """One forward of all chunks in pipeline order. Returns the tokens that follow the sampled sequences, and their log-probs."""
    dims, device = engine.dims, platform.device()
    flat = [token for tokens in step.new for token in tokens]
    padding = -len(flat) % (dims.tp if dims.sp else 1)
    tokens = torch.tensor(flat + [0] * padding, device=device)
    group = parallel_state.get_pipeline_model_parallel_group()
    ranks = dist.get_process_group_ranks(group)
    hidden, result = None, None
    for stage in range(dims.pp * dims.vpp):
        chunk, pp_rank = divmod(stage, dims.pp)
        if pp_rank == engine.coords.pp_rank:
            model, cache = engine.models[chunk], caches[chunk]
            for copy in step.copies:
                cache.copy(*copy)
            cached = CachedStep(cache, tuple(map(len, step.new)), tuple(step.cached), device)
            if stage:
                model.set_input_tensor(_receive(engine, tokens.numel(), hidden, ranks, pp_rank))
            if model.post_process:
                last, rows = torch.tensor(step.last, device=device), step.sampling(device)
                model.output_layer.project = functools.partial(
                    _next_token, vocab_size=engine.hf["vocab_size"], last=last, rows=rows
                )
            hidden = model(tokens, CacheLayout.make(cached, padding), None)
            if model.post_process:
                result = hidden[0]
            elif dims.pp > 1:
                dist.send(hidden.contiguous(), ranks[(pp_rank + 1) % dims.pp], group=group)
    if dims.pp > 1:
        if result is None:
            result = torch.empty(len(step.sampled), 2, dtype=torch.float64, device=device)
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


def _next_token(hidden: Tensor, weight: Tensor, *, vocab_size: int, last: Tensor, rows: SamplingRows) -> Tensor:
    """[S, 2] fp64: the next token of each sampled sequence and its log-prob; last [S]: where its last token is in hidden."""
    if not last.numel():
        return hidden.new_zeros(0, 2, dtype=torch.float64)
    group = parallel_state.get_tensor_model_parallel_group()
    logits = torch.nn.functional.linear(hidden[last], weight)
    chosen = choose(logits, rows, VocabShard(vocab_size, group.rank() * weight.shape[0], group))
    return torch.stack([t.double() for t in chosen], dim=-1)
