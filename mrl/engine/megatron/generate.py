"""Generates from the engine's own weights, with a KV cache, under any layout.

Ranks of one replica (tp, pp) work on the same sequences. Each data-parallel and context-parallel replica takes a share
of the requests. If experts are spread over replicas, all replicas take part in every forward. A replica without
requests then feeds one token and ignores the result.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from mrl.engine import collective
from mrl.engine.generation import SampledTokens, Schedule, Step, check_room, complete, may_read_late
from mrl.engine.kept import KeptSequences
from mrl.engine.logprobs import VocabShard
from mrl.engine.megatron.model import Model
from mrl.engine.requests import Completion, GenerateRequest
from mrl.engine.sampling import CANDIDATE_FACTOR, SamplingRows, choose_among
from mrl.errors import ConfigError
from mrl.mcore_models import decoder, fp8, userbuffers
from mrl.mcore_models.attention import CacheLayout, SdpaAttention
from mrl.mcore_models.decode_graphs import DecodeGraphs
from mrl.mcore_models.delta_net import GatedDeltaNet
from mrl.ops import devices
from mrl.ops.devices import tensor_on
from mrl.ops.kv_cache import CachedStep, KVCache

NOT_DECODED_HERE = "its layers go through megatron's own modules (docs/decoding.md)"


def run(
    model: Model,
    requests: Sequence[GenerateRequest],
    *,
    cache_tokens: int,
    prefill_tokens: int,
    progress: Callable[[int, int], None],
    kept: KeptSequences | None,
    cuda_graphs: bool,
) -> list[Completion]:
    """Returns the completions in the order of the requests, on every rank.

    cuda_graphs: sequences past their prompt have fixed shapes if the model allows it (decode_graphs.py).
    """
    check_room(requests, cache_tokens)
    fp8.forget_copies(model.chunks)  # decoding is in bfloat16, so their memory is free for the cache
    dims, coords = model.dims, model.coords
    replicas = dims.dp * dims.cp
    kept = KeptSequences(0) if kept is None else kept
    mine = kept.share(requests, coords.dp_rank * dims.cp + coords.cp_rank, replicas)
    schedule = Schedule(
        [(i, requests[i]) for i in mine], cache_tokens=cache_tokens, prefill_tokens=prefill_tokens, kept=kept,
        recurrent=any(model.transformer.linear_attention_freq or ()),
        late=may_read_late(requests, model.device) and not model.batch_invariant,
    )  # fmt: skip
    own_attention = contextlib.nullcontext() if model.spec == "local" else _own_attention(model)
    with own_attention, fp8.disabled(model.chunks), userbuffers.disabled(model.chunks):
        runner = _Runner(model, schedule, kept, cuda_graphs=cuda_graphs)
        completions = complete(
            schedule, runner.launch,
            any_has_work=functools.partial(_any_has_work, model),
            keep=lambda gone: kept.keep(gone, runner.caches),
            progress=lambda done: progress(done, len(mine)),
        )  # fmt: skip
        model.captures_graphs &= all(fixed.captures for fixed in runner.fixed)
    if replicas > 1:
        everyone = collective.all_ranks().gather(completions)
        completions = {i: completion for part in everyone for i, completion in part.items()}
    return [completions[i] for i in range(len(requests))]


def _any_has_work(model: Model, here: bool) -> bool:
    """Returns whether this replica has work, or any replica if experts are spread over them."""
    if not model.dims.experts_span_replicas:
        return here  # other replicas need nothing of this one
    return bool(collective.max_over_ranks(model.device, here)[0])


@contextlib.contextmanager
def _own_attention(model: Model) -> Iterator[None]:
    """Replaces transformer-engine's core attention inside by one that reads `CacheLayout`, with the same sinks."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    attentions = [layer.self_attention for chunk in model.chunks for layer in chunk.decoder.layers]
    attentions = [attention for attention in attentions if not isinstance(attention, GatedDeltaNet)]
    replaced = [attention.core_attention for attention in attentions]
    for attention in attentions:
        scale = model.transformer.latent_scale if model.transformer.multi_latent_attention else None
        own = SdpaAttention(model.transformer, attention.layer_number, softmax_scale=scale, pg_collection=groups)
        if own.softmax_offset is not None:
            own.softmax_offset = attention.core_attention.softmax_offset
        attention.core_attention = own.eval()
    try:
        yield
    finally:
        for attention, core in zip(attentions, replaced, strict=True):
            attention.core_attention = core


class _Runner:
    """Runs this rank's chunks and their caches through the steps of one generation."""

    def __init__(self, model: Model, schedule: Schedule, kept: KeptSequences, *, cuda_graphs: bool) -> None:
        self.model, self.dims, self.kept = model, model.dims, kept
        # stages have different layers and adapters, and all ranks of a step must run the same decoder
        self.lean = all(collective.all_ranks().gather(all(decoder.supports_chunk(chunk) for chunk in model.chunks)))
        self.decoders = self._prepared() if self.lean else []
        self.caches = [KVCache(schedule.rows, schedule.length) for _ in model.chunks]
        self.fixed = collective.call_on_every_rank(self._fixed_steps) if cuda_graphs else []
        self.pp_group = parallel_state.get_pipeline_model_parallel_group()
        self.ranks = dist.get_process_group_ranks(self.pp_group)

    def _prepared(self) -> list[decoder.Decoder]:
        """Returns the decoders of the chunks. On a CPU they copy weights, so those of the previous call are used
        again."""
        decoders = self.kept.prepared.value
        if decoders is None:
            decoders = [decoder.Decoder(chunk) for chunk in self.model.chunks]
            if devices.device().type == "cpu":  # on a GPU they are views of weights, which may be offloaded meanwhile
                self.kept.prepared.value = decoders
        return decoders

    def _fixed_steps(self) -> list[DecodeGraphs]:
        """Returns the steps of fixed shapes of each chunk. Raises ConfigError if a chunk has none."""
        assert not self.model.batch_invariant, "steps of fixed shapes are of several sequences"
        refusals = [decoder.fixed_refusal(chunk) for chunk in self.model.chunks] if self.lean else [NOT_DECODED_HERE]
        why = next((why for why in refusals if why is not None), None)
        if why is not None:
            raise ConfigError("rollout.cuda_graphs", True, f"is not for this model and layout: {why}", "leave it out")
        captures = self.model.captures_graphs
        return [DecodeGraphs(*of, captures=captures) for of in zip(self.decoders, self.caches, strict=True)]

    def launch(self, step: Step, before: Tensor | None) -> SampledTokens:
        """Begins a step. Returns the tokens that follow its sampled sequences. before: those of the step before."""
        for chunk, cache in enumerate(self.caches):
            cache.arrange(step.copies, step.shape)
            self.kept.restore(step.restored, cache, chunk)
        if self.model.batch_invariant:
            parts = self._one_by_one(step)
        elif self.fixed and (count := self._apart(step)):
            prompts = [cache.part(count, len(step.lengths) - count) for cache in self.caches]
            parts = [self._run_batch(step.part(0, count), self.caches, before, behind=step.cached[count:])]
            parts.append(self._run_batch(step.part(count, len(step.lengths)), prompts, before))
        else:
            parts = [self._run_batch(step, self.caches, before)]
        return SampledTokens([result for result, _ in parts], [more for _, more in parts])

    def _apart(self, step: Step) -> int:
        """Returns how many leading sequences decode in fixed shapes while others of the step have prompts; 0 if all run
        together.

        Rows behind those that decode may be filled up with tokens that stand for nothing. Such a token takes the place
        of a prompt's next one, which is written after it. States have no such place.
        """
        count = step.decoding
        # of the whole model, since all pipeline stages must run the same parts
        recurrent = any(self.model.transformer.linear_attention_freq or ())
        if count == len(step.lengths) or recurrent and any(step.cached[count:]):
            return 0
        return count

    def _one_by_one(self, step: Step) -> list[tuple[Tensor, Callable[[], Tensor]]]:
        """Runs a step one token at a time, each over its own sequence, prompts too.

        So the computation of a sequence has the same shapes and the same alignment in memory, whatever shares the step.
        """
        parts = []
        for row, (new, cached) in enumerate(zip(step.new, step.cached, strict=True)):
            caches = [cache.part(row, 1) for cache in self.caches]
            for i, token in enumerate(new):
                sampled = [0] if row in step.sampled and i == len(new) - 1 else []
                alone = Step(None, [], [token], [1], [cached + i], sampled, step.sequences[row : row + 1])
                parts.append(self._run_batch(alone, caches, None))
        return parts

    def _run_batch(
        self, step: Step, caches: Sequence[KVCache], before: Tensor | None, behind: Sequence[int] = ()
    ) -> tuple[Tensor, Callable[[], Tensor]]:
        """Runs sequences in the order of their rows through all chunks in pipeline order.

        Returns what the last stage has sampled: a part of `SampledTokens`, and a function that looks among more
        candidates.
        behind: how many tokens the rows after these have, if they belong to other sequences of the step.
        """
        dims, device = self.dims, devices.device()
        fixed = bool(self.fixed) and len(step.tokens) == len(step.lengths)  # no prompts
        padding = -len(step.tokens) % (dims.tp if dims.sp and not self.lean else 1)
        tokens = step.token_ids(device, before, padding)
        hidden, result, choice = None, None, None
        for stage in range(dims.pp * dims.vpp):
            chunk, pp_rank = divmod(stage, dims.pp)
            if pp_rank == self.model.coords.pp_rank:
                if stage and dims.pp > 1:
                    hidden = self._receive(len(tokens), (pp_rank - 1) % dims.pp)
                last = self.model.chunks[chunk].post_process
                choice = _TokenChoice(step, self.model.hf["vocab_size"]) if last else None
                if fixed:
                    hidden = self.fixed[chunk](
                        tokens, step.cached, None if hidden is None else hidden.squeeze(1), behind
                    )
                    hidden = self._output_of(chunk, hidden, choice)
                else:
                    alone = self.model.batch_invariant
                    cached = CachedStep(caches[chunk], tuple(step.lengths), tuple(step.cached), device, copies=alone)
                    hidden = self._chunk(chunk, tokens, hidden, cached, choice)
                if last:
                    result = hidden
                elif dims.pp > 1:
                    dist.send(hidden.contiguous(), self.ranks[(pp_rank + 1) % dims.pp], group=self.pp_group)
        if result is None:  # another rank has the last stage
            result = torch.empty(3, len(step.sampled), dtype=torch.float64, device=device)
        return self._of_all_stages(result), functools.partial(self._among_more, choice, result)

    def _among_more(self, choice: _TokenChoice | None, result: Tensor) -> Tensor:
        """Chooses again, among more candidates. All ranks of a replica know that it is needed."""
        return self._of_all_stages(result if choice is None else choice.among_more())

    def _of_all_stages(self, result: Tensor) -> Tensor:
        """Returns the result of the last stage on every stage."""
        if self.dims.pp > 1:
            dist.broadcast(result, self.ranks[-1], group=self.pp_group)
        return result

    def _chunk(
        self,
        chunk: int,
        tokens: Tensor,
        hidden: Tensor | None,
        cached: CachedStep,
        choose_next: Callable[..., Tensor] | None,
    ) -> Tensor:
        """Returns hidden states [T (/tp), 1, N] for the next stage; on the last stage the result of `choose_next`, [3,
        S]."""
        own = self.model.chunks[chunk]
        if self.lean:
            hidden = self.decoders[chunk](tokens, None if hidden is None else hidden.squeeze(1), cached)
            return self._output_of(chunk, hidden, choose_next)
        if hidden is not None:
            own.set_input_tensor(hidden)
        if choose_next is not None:
            own.output_layer.project = choose_next
        out = own(tokens, CacheLayout.make(cached, padding=tokens.numel() - cached.tokens), None)
        return out if choose_next is None else out[0]

    def _output_of(self, chunk: int, hidden: Tensor, choose_next: Callable[..., Tensor] | None) -> Tensor:
        """Returns the result of `_chunk` from a decoder's hidden states [T, N]."""
        if choose_next is None:
            return hidden.unsqueeze(1)
        own = self.model.chunks[chunk]
        tied = own.share_embeddings_and_output_weights
        return choose_next(hidden, own.shared_embedding_or_output_weight() if tied else own.output_layer.weight)

    def _receive(self, tokens: int, source: int) -> Tensor:
        """Returns the hidden states of the stage before."""
        rows = tokens // self.dims.tp if self.dims.sp and not self.lean else tokens
        shape = (rows, 1, self.model.hf["hidden_size"])
        buffer = torch.empty(shape, dtype=self.model.dtype, device=devices.device())
        dist.recv(buffer, self.ranks[source], group=self.pp_group)
        return buffer


class _TokenChoice:
    """Chooses the next tokens of a step's sampled sequences, on the last stage."""

    def __init__(self, step: Step, vocab_size: int) -> None:
        self.step, self.vocab_size = step, vocab_size
        self._from: tuple[Tensor, SamplingRows, VocabShard] | None = None
        self._count = 0  # of candidates

    def __call__(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Returns [3, S] fp64: tokens, their log-probs, and 1 if they hold or 0 if more candidates are needed.

        hidden: [T, N] whole; weight: [V, N] local.
        """
        if not self.step.sampled:
            return hidden.new_zeros(3, 0, dtype=torch.float64)
        group = parallel_state.get_tensor_model_parallel_group()
        if len(self.step.sampled) < len(hidden):
            hidden = hidden[tensor_on(hidden.device, self.step.last)]
        logits = torch.nn.functional.linear(hidden, weight)
        shard = VocabShard(self.vocab_size, group.rank() * weight.shape[0], group)
        rows = self.step.sampling(hidden.device)
        self._from, self._count = (logits, rows, shard), rows.candidates
        return self._among()

    def among_more(self) -> Tensor:
        """Chooses again, among more candidates. Collective over tensor-parallel ranks, and all of them know that it is
        needed."""
        self._count *= CANDIDATE_FACTOR
        return self._among()

    def _among(self) -> Tensor:
        assert self._from is not None
        token, log_prob, exact = choose_among(*self._from, self._count)
        if exact is None:
            self._from = None  # these logits may wait for the host as long as the next step takes
        holds = torch.ones_like(log_prob) if exact is None else exact.double()
        return torch.stack([token.double(), log_prob, holds])
