"""Describes requests for completions and their results (`mrl.engine.base.BaseEngine.generate`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from mrl.engine.sampling import GREEDY, SamplingKey, SamplingParams

CACHE_TOKENS = 65536
PREFILL_TOKENS = 4096


@dataclasses.dataclass(frozen=True)
class GenerateRequest:
    """Holds one prompt and how to complete it."""

    tokens: Sequence[int]  # the prompt's ids, at least one
    max_new_tokens: int
    stop_tokens: Sequence[int] = ()  # ids that end the completion and stay in it
    sampling: SamplingParams = GREEDY
    key: SamplingKey = SamplingKey()  # determines the noise of this completion, with the position of each token
    stop_at: Callable[[list[int]], bool] | None = None
    """Called with the new ids after each of them; true ends the completion (at a stop string, for example). It must
    return the same on every rank."""


@dataclasses.dataclass(frozen=True)
class Completion:
    """Holds the tokens that were generated for a request."""

    tokens: list[int]  # the new ids, without the prompt
    log_probs: list[float]
    """One per new token: log_softmax(logits / temperature) of the model, before top_k, top_p and min_p. It is the
    result of `forward_backward_step` with `ctx["temperature"]`; at temperature 0 (greedy) as at 1."""
    finished: bool  # a stop token or `stop_at` ended it


def no_progress(done: int, of: int) -> None:
    """Ignores progress: the callback of a caller that asks for none."""
