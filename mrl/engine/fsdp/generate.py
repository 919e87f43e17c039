"""Generation with a transformers model whose weights are sharded. Each rank completes requests of its own.

The cache of keys and values is mrl's (mrl/ops/kv_cache.py); attention.py reads and fills it. New tokens of all
sequences go through the model end to end, as documents do in training, without padding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from mrl.engine.base import Completion, GenerateRequest
from mrl.engine.fsdp.output import hidden_states, output_weight
from mrl.engine.generation import SampledTokens, Schedule, Step, complete, may_read_late
from mrl.engine.kept import KeptSequences
from mrl.engine.logprobs import LogitRule, VocabShard
from mrl.engine.sampling import choose
from mrl.ops.devices import tensor_on
from mrl.ops.kv_cache import CachedStep, KVCache


@torch.no_grad()
def generate(
    use: Callable[[Callable[[nn.Module], SampledTokens]], SampledTokens],
    requests: Sequence[tuple[int, GenerateRequest]],
    *,
    device: torch.device,
    any_rank: Callable[[bool], bool],
    cache_tokens: int,
    prefill_tokens: int,
    progress: Callable[[int, int], None],
    kept: KeptSequences,
    rule: LogitRule,
    recurrent: bool,
) -> dict[int, Completion]:
    """Completes `requests`, each with its index. Returns the completions by index. Every rank calls this together.

    use: runs a function of the model with its weights gathered. rule: from the numbers of the output layer to logits.
    recurrent: as of `Schedule`.
    any_rank: whether the flag is set on any rank. A rank that is done keeps step with the others, because gathering
    weights takes all.
    """
    schedule = Schedule(
        requests, cache_tokens=cache_tokens, prefill_tokens=prefill_tokens, kept=kept, recurrent=recurrent,
        late=may_read_late([request for _, request in requests], device),
    )  # fmt: skip
    cache = KVCache(schedule.rows, schedule.length)

    def launch(step: Step, before: Tensor | None) -> SampledTokens:
        cache.arrange(step.copies, step.shape)
        kept.restore(step.restored, cache)
        return use(functools.partial(forward, step=step, before=before, cache=cache, device=device, rule=rule))

    return complete(
        schedule, launch, any_has_work=any_rank, keep=lambda gone: kept.keep(gone, [cache]),
        progress=lambda done: progress(done, len(requests)),
    )  # fmt: skip


def forward(
    hf: nn.Module, step: Step, before: Tensor | None, cache: KVCache, device: torch.device, rule: LogitRule
) -> SampledTokens:
    """Chooses the tokens that follow the sampled sequences of a step."""
    cached = CachedStep(cache, tuple(step.lengths), tuple(step.cached), device)
    tokens = step.token_ids(device, before)
    hidden = hidden_states(hf, input_ids=tokens[None], position_ids=cached.positions[None], cached_step=cached)[0]
    if not step.sampled:
        return SampledTokens([hidden.new_zeros(3, 0, dtype=torch.float64)], ())
    last, weight = output_weight(hf, hidden[tensor_on(device, step.last)])
    logits = rule((last @ weight.t()).float())  # in fp32, as where log-probs are computed again
    chosen, log_probs = choose(logits, step.sampling(device), VocabShard(weight.shape[0]))
    return SampledTokens([torch.stack([chosen.double(), log_probs, torch.ones_like(log_probs)])], ())
