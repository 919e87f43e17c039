"""The actor's own engine as a sampler: there is nothing to hand over, and the policy that samples is the one that trains."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from mrl.engine.base import BaseEngine, Completion, GenerateRequest
from mrl.rollout.base import Sampler, SampleRequest
from mrl.rollout.stops import StopTexts


class EngineSampler(Sampler):
    """Samples from the weights of `engine` as they are now. cache_tokens, prefill_tokens: as of `BaseEngine.generate`."""

    exact = True

    def __init__(
        self, engine: BaseEngine, tokenizer: PreTrainedTokenizerBase, *, cache_tokens: int, prefill_tokens: int
    ) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._cache_tokens, self._prefill_tokens = cache_tokens, prefill_tokens
        self._stops: dict[tuple[str, ...], StopTexts] = {}

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        return self._engine.generate(
            [self._for_engine(request) for request in requests],
            cache_tokens=self._cache_tokens,
            prefill_tokens=self._prefill_tokens,
        )

    def _for_engine(self, request: SampleRequest) -> GenerateRequest:
        stop = tuple(request.stop)
        if stop and stop not in self._stops:
            self._stops[stop] = StopTexts(self._tokenizer, stop)
        return GenerateRequest(
            tokens=request.tokens,
            max_new_tokens=request.max_new_tokens,
            stop_tokens=request.stop_tokens,
            sampling=request.sampling,
            key=request.key,
            stop_at=self._stops.get(stop),
        )
