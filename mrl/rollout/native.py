"""The actor's own engine as a sampler. There is nothing to sync: the policy that samples also trains."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from mrl.engine.base import Completion, GenerateRequest
from mrl.engine.kept import KeptSequences, PreparedWeights
from mrl.rollout.base import Sampler, SampleRequest
from mrl.rollout.stops import StopTexts


class EngineSampler(Sampler):
    """Samples by `generate`, which is `BaseEngine.generate` of the actor with its limits of memory.

    kept_tokens: of conversations, how many tokens' keys and values each replica of the actor keeps between their turns.
    """

    exact = True

    def __init__(
        self, generate: Callable[..., list[Completion]], tokenizer: PreTrainedTokenizerBase, *, kept_tokens: int = 0
    ) -> None:
        self._generate, self._tokenizer, self._kept_tokens = generate, tokenizer, kept_tokens
        self._stop_texts = functools.cache(functools.partial(StopTexts, tokenizer))

    def for_conversations(self, parts: int) -> list[Sampler]:
        # A part has room of its own, so the kept and the recomputed tokens do not depend on when others answer.
        # The weights are prepared once: on a CPU that is a copy of them.
        room, prepared = self._kept_tokens // parts, PreparedWeights()
        return [
            EngineSampler(functools.partial(self._generate, kept=KeptSequences(room, prepared)), self._tokenizer)
            for _ in range(parts)
        ]

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        return self._generate([self._for_engine(request) for request in requests])

    def _for_engine(self, request: SampleRequest) -> GenerateRequest:
        stops = self._stop_texts(tuple(request.stop)) if request.stop else None
        return GenerateRequest(
            tokens=request.tokens,
            max_new_tokens=request.max_new_tokens,
            stop_tokens=request.stop_tokens,
            sampling=request.sampling,
            key=request.key,
            stop_at=_any_of(request.on_token, stops),
        )


def _any_of(
    seen: Callable[[list[int]], bool] | None, stops: Callable[[list[int]], bool] | None
) -> Callable[[list[int]], bool] | None:
    """Returns a function that calls both with the new tokens, and ends a completion if either does."""
    if seen is None or stops is None:
        return seen or stops
    return lambda new: any([seen(new), stops(new)])
