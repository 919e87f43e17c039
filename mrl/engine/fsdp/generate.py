"""Generation with a transformers model whose weights are sharded. Each rank completes requests of its own.

The keys and values are ours (mrl/mcore_models/kv_cache.py), reached through the attention function in attention.py: new
tokens of all sequences go through the model end to end, as documents do in training, without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from mrl.engine.base import Completion, GenerateRequest
from mrl.engine.generation import DUMMY, Schedule, Step
from mrl.engine.logprobs import VocabShard
from mrl.engine.sampling import choose
from mrl.mcore_models.kv_cache import CachedStep, KVCache


@torch.no_grad()
def generate(
    use: Callable[[Callable[[nn.Module], tuple[list[int], list[float]]]], tuple[list[int], list[float]]],
    requests: Sequence[tuple[int, GenerateRequest]],
    *,
    device: torch.device,
    any_rank: Callable[[bool], bool],
    cache_tokens: int,
    prefill_tokens: int,
    told: Callable[[int, int], None],
) -> dict[int, Completion]:
    """Completes `requests`, each with its index, by which the completions come back. Every rank calls this together.

    use: runs a function of the model where its weights are gathered. any_rank: whether the flag is set on any rank;
    a rank that is done keeps step with the others, because gathering weights takes all.
    """
    schedule = Schedule(requests, cache_tokens=cache_tokens, prefill_tokens=prefill_tokens)
    cache = KVCache(schedule.rows, schedule.length)
    while any_rank(not schedule.done):
        step = DUMMY if schedule.done else schedule.next()
        cache.arrange(step.copies, step.shape)
        schedule.take(step, *use(lambda hf, step=step: forward(hf, step, cache, device)))
        told(schedule.completed, len(requests))
    return dict(schedule.completions())


def forward(hf: nn.Module, step: Step, cache: KVCache, device: torch.device) -> tuple[list[int], list[float]]:
    """The tokens that follow the sampled sequences of a step, and their log-probs."""
    cached = CachedStep(cache, tuple(map(len, step.new)), tuple(step.cached), device)
    tokens = torch.tensor([token for tokens in step.new for token in tokens], device=device)
    hidden: Tensor = hf.model(
        input_ids=tokens[None], position_ids=cached.positions[None], use_cache=False, cached_step=cached
    ).last_hidden_state[0]  # fmt: skip
    if not step.sampled:
        return [], []
    logits = hidden[torch.tensor(step.last, device=device)] @ hf.lm_head.weight.t()
    chosen, log_probs = choose(logits, step.sampling(device), VocabShard(hf.config.vocab_size))
    return chosen.tolist(), log_probs.tolist()
