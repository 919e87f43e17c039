"""What an engine is asked to complete, and what it answers (`mrl.engine.base.BaseEngine.generate`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from mrl.engine.sampling import GREEDY, SamplingKey, SamplingParams

CACHE_TOKENS = 65536
PREFILL_TOKENS = 4096


@dataclasses.dataclass(frozen=True)
class GenerateRequest:
    """One prompt and how it is to be completed.

    tokens: the prompt's ids, at least one. max_new_tokens: how many may follow. stop_tokens: ids that end it (kept in the
    completion). sampling: how tokens are drawn; greedy by default. key: what the noise of this completion follows from,
    with the position of each token. stop_at: called with the new ids after each of them, and ends the completion where it
    says so (a stop string, for one who has the tokenizer); it must answer alike on every rank.
    """

    tokens: Sequence[int]
    max_new_tokens: int
    stop_tokens: Sequence[int] = ()
    sampling: SamplingParams = GREEDY
    key: SamplingKey = SamplingKey()
    stop_at: Callable[[list[int]], bool] | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
    """What was generated. tokens: new ids, without the prompt. finished: a stop token or `stop_at` ended it.

    log_probs: one per new token: log_softmax(logits / temperature) of the model, before top_k, top_p and min_p, which is
    what `forward_backward_step` gives with `ctx["temperature"]`; at temperature 0 (greedy) as at 1.
    """

    tokens: list[int]
    log_probs: list[float]
    finished: bool


def tell_nobody(done: int, of: int) -> None:
    """What `BaseEngine.generate` tells of its progress to one who does not ask."""
