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


@dataclasses.dataclass(eq=False, slots=True)
class ActiveRequest:
    """Holds a request that is being completed."""

    request: GenerateRequest
    index: int  # in the caller's list
    prompt: tuple[int, ...]
    context: list[int]  # the prompt and what followed
    key_hash: int  # of `mrl.engine.sampling.key_hash`, signed
    length: int  # tokens, sampled ones that the host has not read included
    sampling: SamplingParams  # of the request; equal ones of a schedule are one object
    log_probs: list[float] = dataclasses.field(default_factory=list)
    kept: int = 0  # tokens of the prompt that are kept from an earlier request
    cached: int = 0  # tokens of the context in the cache
    row: int = -1  # of the cache
    place: int = -1  # among the sequences that the last step has sampled
    finished: bool = False
    most: int = dataclasses.field(init=False)  # tokens of the prompt and the longest completion

    def __post_init__(self) -> None:
        self.most = len(self.prompt) + self.request.max_new_tokens

    @property
    def tokens(self) -> list[int]:
        return self.context[len(self.prompt) :]

    @property
    def done(self) -> bool:
        """Returns whether no step feeds this sequence again."""
        return self.finished or self.length >= self.most

    def stops(self) -> bool:
        """Returns whether a stop token or `stop_at` ends the completion with its last token, and keeps the answer."""
        stop_at = self.request.stop_at
        self.finished = self.context[-1] in self.request.stop_tokens or (stop_at is not None and stop_at(self.tokens))
        return self.finished


def no_progress(done: int, of: int) -> None:
    """Ignores progress: the callback of a caller that asks for none."""
