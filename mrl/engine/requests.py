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
    stop_tokens: Sequence[int] = ()  # ids that end it, and are kept in the completion
    sampling: SamplingParams = GREEDY
    key: SamplingKey = SamplingKey()  # what the noise of this completion follows from, with the position of each token
    stop_at: Callable[[list[int]], bool] | None = None
    """Called with the new ids after each of them; ends the completion where it says so (a stop string, for one who has
    the tokenizer). It must answer alike on every rank."""


@dataclasses.dataclass(frozen=True)
class Completion:
    """Holds the tokens that were generated for a request."""

    tokens: list[int]  # the new ids, without the prompt
    log_probs: list[float]
    """One per new token: log_softmax(logits / temperature) of the model, before top_k, top_p and min_p, which is what
    `forward_backward_step` gives with `ctx["temperature"]`; at temperature 0 (greedy) as at 1."""
    finished: bool  # a stop token or `stop_at` ended it


def no_progress(done: int, of: int) -> None:
    """Ignores progress: the callback of a caller that asks for none."""
