"""Handles OpenAI's interface: evaluation tools read snapshots and saves while the policy trains.

It has `/v1/models`, `/v1/completions` and `/v1/chat/completions`, with the fields that such tools send: several
prompts, token ids, n, stop, seed, logprobs, echo, streams. A model's name is the base's, a sampler's id, or the path of
a save.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mrl.engine.base import Completion
from mrl.errors import UserError
from mrl.inference.streaming import StreamedText
from mrl.serve.app import ENDS, ClientRequest
from mrl.serve.ledger import SamplerRecord
from mrl.serve.models import SampleOutcome
from mrl.serve.operations import DrawSamples
from mrl.serve.request_queue import JSON, Future, Result
from mrl.serve.requests import MAX_NUMBERS, RequestError, check_numbers, field, number, refuse_fields, seed_of
from mrl.serve.sampling import MAX_SAMPLES, Prompts, SamplingHandlers, sampling_of, source_of
from mrl.serve.training import PreparedOperation

DEFAULT_TOKENS = 16
MAX_TOP_LOGPROBS = 20
HUNG_UP = object()
DONE = b"data: [DONE]\n\n"
NOT_DONE = (
    "best_of", "suffix", "logit_bias", "response_format", "functions", "function_call", "audio", "modalities",
    "chat_template",
)  # fmt: skip
NOT_HERE = {
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0.0, "min_tokens": 0.0,
}  # fmt: skip
Kind = Literal["text_completion", "chat.completion"]


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    """One parsed request. echo: the prompt is a part of the answer."""

    kind: Kind
    model: str
    source: SamplerRecord
    samples: Sequence[DrawSamples]  # one for each prompt
    echo: bool
    top: int | None  # log-probs, with so many others; None for none
    top_of_prompt: int | None  # vLLM's prompt_logprobs, likewise
    without: bool  # completions are thrown away: the prompt alone is scored
    stream: bool
    usage: bool  # a stream ends with how many tokens there were


class OpenAIHandlers:
    """Handles OpenAI's endpoints."""

    def __init__(
        self, sampling: SamplingHandlers, tokenizer: PreTrainedTokenizerBase, snapshots: Callable[[], Collection[str]]
    ) -> None:
        self.snapshots = snapshots  # names of those that the ranks have
        self.sampling, self.tokenizer = sampling, tokenizer
        self.served, self.ledger, self.request_queue = sampling.served, sampling.ledger, sampling.request_queue
        self.prompts = Prompts(tokenizer, self.served.limits)

    async def models(self, request: ClientRequest) -> Response:
        saved = [one.path for one in self.ledger.saved.values() if one.part == "sampler_weights"]
        here = self.snapshots()
        names = [self.served.base, *saved, *(one.id for one in self.ledger.samplers.values() if one.snapshot in here)]
        return JSONResponse({"object": "list", "data": [_about(name) for name in names]})

    async def model(self, request: ClientRequest) -> Response:
        name = request.path["name"]
        try:
            self._source(name)
        except UserError as error:
            raise RequestError(404, str(error)) from None
        return JSONResponse(_about(name))

    async def completions(self, request: ClientRequest) -> Response:
        return await self._answer(self._completions, request)

    def _completions(self, body: Mapping[str, Any]) -> CompletionRequest:
        prompts = self.prompts.of_completions(body)
        return self._wanted(body, "text_completion", prompts, number(body, "max_tokens", DEFAULT_TOKENS))

    async def chat_completions(self, request: ClientRequest) -> Response:
        return await self._answer(self._chat_completions, request)

    def _chat_completions(self, body: Mapping[str, Any]) -> CompletionRequest:
        ids = self.prompts.of_chat(body)
        room = max(1, self.served.limits.length - len(ids))
        most = number(body, "max_tokens", number(body, "max_completion_tokens", room), least=1)
        return self._wanted(body, "chat.completion", [ids], most)

    # -- the request -------------------------------------------------------------------------------------------------

    def _source(self, name: str) -> SamplerRecord:
        if name == self.served.base:
            return SamplerRecord("", "", name)
        if name in self.ledger.samplers:
            return self.ledger.samplers[name]
        if name not in self.ledger.saved:
            fix = f"give {self.served.base}, or another that GET /v1/models lists"
            raise RequestError(404, str(UserError("model", name, "is not served here", fix)))
        return self.sampling.of_save(name, "model")

    def _wanted(
        self, body: Mapping[str, Any], kind: Kind, prompts: Sequence[Sequence[int]], most: int
    ) -> CompletionRequest:
        refuse_fields(body, NOT_DONE)
        for name, neutral in NOT_HERE.items():
            if field(body, name, float, neutral) != neutral:
                raise UserError(name, body[name], "is not done by this server", f"leave it out, or give {neutral}")
        name, count = field(body, "model", str), number(body, "n", 1, least=1)
        if count * len(prompts) > MAX_SAMPLES:
            raise UserError("n", count, f"makes more than {MAX_SAMPLES} completions", "ask for fewer")
        echo, top, top_of_prompt = field(body, "echo", bool, False), self._top(body, kind), None
        if kind == "text_completion":
            top_of_prompt = self._at_most(self.served.limits.vocab_size, body, "prompt_logprobs")
            numbers = (top_of_prompt or 0) * count * sum(map(len, prompts))
            check_numbers("prompt_logprobs", numbers, MAX_NUMBERS // 4)  # as JSON each takes some 80 bytes
        above = [of for of in (top if echo else None, top_of_prompt) if of is not None]
        stop, stop_tokens = self.sampling.stop_conditions(body.get("stop"))
        params = {**body, "top_k": body.get("top_k", -1)}
        samples = []
        for i, ids in enumerate(prompts):
            room = self.served.limits.length - len(ids)
            if most > room:
                fix = f"ask for at most {max(room, 0)}, or raise serve.max_length"
                raise UserError("max_tokens", most, f"is more than fits after the {len(ids)} tokens of prompt {i}", fix)
            samples.append(DrawSamples(
                ids, count, max(most, 1), sampling_of(params), seed_of(body),
                stop_tokens, stop, bool(above), max(above, default=0), top or 0,
            ))  # fmt: skip
        stream = field(body, "stream", bool, False)
        if stream and (echo or top is not None or top_of_prompt is not None):
            why = "does not go with logprobs or echo on this server, nor with prompt_logprobs"
            raise UserError("stream", True, why, "leave stream out, or the others")
        usage = field(field(body, "stream_options", dict, {}), "include_usage", bool, False)
        return CompletionRequest(
            kind, name, self._source(name), samples, echo, top, top_of_prompt, most == 0, stream, usage
        )

    def _top(self, body: Mapping[str, Any], kind: Kind) -> int | None:
        if kind == "text_completion":
            return self._at_most(MAX_TOP_LOGPROBS, body, "logprobs")
        if not field(body, "logprobs", bool, False):
            return None
        return self._at_most(MAX_TOP_LOGPROBS, body, "top_logprobs") or 0

    def _at_most(self, most: int, body: Mapping[str, Any], name: str) -> int | None:
        """Returns how many log-probs a field asks for beside each token's own. Raises UserError."""
        top: int | None = number(body, name, None)
        if top is not None and top > most:
            raise UserError(name, top, f"is above {most}", f"give at most {most}")
        return top

    # -- the answer --------------------------------------------------------------------------------------------------

    async def _answer(
        self, parse: Callable[[Mapping[str, Any]], CompletionRequest], request: ClientRequest
    ) -> Response:
        """Answers when all is drawn, or as it comes. If the client hangs up, nothing more is drawn for it."""
        wanted = await run_in_threadpool(parse, request.json)
        id, queue = f"mrl-{secrets.token_hex(12)}", asyncio.Queue[Any]()
        loop = asyncio.get_running_loop()
        self.request_queue.check_room(len(wanted.samples))  # for all or none: it is asked for again

        def tell(what: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(queue.put_nowait, what)

        futures = []
        for i, sample in enumerate(wanted.samples):
            future = self.request_queue.put_batched(source_of(wanted.source), (id, i), _streamed(sample, i, tell))
            self.request_queue.add_callback(future, functools.partial(_tell_result, tell, i, future))
            futures.append(future)
        if wanted.stream:
            return StreamingResponse(self._stream(id, wanted, queue, futures), media_type="text/event-stream")
        outcomes: dict[int, SampleOutcome] = {}
        watch = asyncio.create_task(_wait_for_disconnect(request.request, tell))
        try:
            while len(outcomes) < len(wanted.samples):
                i, what = await queue.get()
                if isinstance(what, SampleOutcome):
                    outcomes[i] = what
                elif what is HUNG_UP:
                    return Response(status_code=499)  # which nobody reads
                elif what is None:
                    raise RequestError(503, ENDS)
                elif isinstance(what, Result) and (error := _error(what)) is not None:
                    raise UserError(error)
        finally:
            watch.cancel()
            _abandon(futures)
        whole = await run_in_threadpool(self._whole, id, wanted, [outcomes[i] for i in range(len(outcomes))])
        return Response(whole, media_type=JSON)

    def _whole(self, id: str, wanted: CompletionRequest, found: Sequence[SampleOutcome]) -> bytes:
        choices: list[dict[str, Any]] = []
        for sample, sampled in zip(wanted.samples, found, strict=True):
            for k in range(sample.count):
                choices.append(self._choice(wanted, len(choices), sample, sampled, k))
        new = 0 if wanted.without else sum(len(one.tokens) for sampled in found for one in sampled.completions)
        answer = _head(id, wanted, wanted.kind) | {"choices": choices, "usage": _usage(wanted, new)}
        return json.dumps(answer).encode()

    def _choice(
        self, wanted: CompletionRequest, index: int, sample: DrawSamples, sampled: SampleOutcome, which: int
    ) -> dict[str, Any]:
        one = sampled.completions[which]
        new = Completion([], [], finished=False) if wanted.without else one
        text = StreamedText(self.tokenizer, lambda _: None, sample.stop_tokens).rest(new.tokens)
        text = _text_before_stop(text, sample.stop)
        choice: dict[str, Any] = {"index": index, "finish_reason": "stop" if new.finished else "length"}
        scores = None if wanted.top is None else self._scores(wanted, sample, sampled, new, which)
        if wanted.kind == "chat.completion":
            content = None if scores is None else {"content": _of_chat(scores)}
            return choice | {"message": {"role": "assistant", "content": text}, "logprobs": content}
        if wanted.top_of_prompt is not None:
            choice["prompt_logprobs"] = self._of_prompt(sample, sampled, wanted.top_of_prompt)
        if wanted.echo:
            text = self.tokenizer.decode(list(sample.tokens), skip_special_tokens=False) + text
        return choice | {"text": text, "logprobs": None if scores is None else _of_completion(scores)}

    def _scores(
        self, wanted: CompletionRequest, sample: DrawSamples, sampled: SampleOutcome, new: Completion, which: int
    ) -> list[dict[str, Any]]:
        """Returns each token of the answer with its log-prob and its neighbours'."""
        scores = []
        if wanted.echo:
            above = sampled.top_of_prompt
            for i, token in enumerate(sample.tokens):
                log_prob = None if i == 0 else (sampled.prompt_log_probs or [])[i - 1]
                others = None if i == 0 or above is None else _first_of(above, i - 1, wanted.top or 0)
                scores.append(self._score(token, log_prob, others))
        beside = None if sampled.top_of_samples is None else sampled.top_of_samples[which]
        for i, (token, log_prob) in enumerate(zip(new.tokens, new.log_probs, strict=True)):
            scores.append(self._score(token, log_prob, None if beside is None else (beside[0][i], beside[1][i])))
        return scores

    def _of_prompt(self, sample: DrawSamples, sampled: SampleOutcome, top: int) -> list[Any]:
        """Returns vLLM's prompt_logprobs: id -> log-prob, rank and text, of each token and the `top` likeliest."""
        found: list[Any] = [None]
        for i, token in enumerate(sample.tokens[1:]):
            each: dict[int, tuple[float, int | None]] = {token: ((sampled.prompt_log_probs or [])[i], None)}
            if top and sampled.top_of_prompt is not None:
                log_probs, ids = _first_of(sampled.top_of_prompt, i, top)
                above = zip(ids.tolist(), log_probs.tolist(), strict=True)
                each |= {id: (value, rank) for rank, (id, value) in enumerate(above, 1) if math.isfinite(value)}
            found.append({
                str(id): {"logprob": value, "rank": rank, "decoded_token": self._text(id)}
                for id, (value, rank) in each.items()
            })  # fmt: skip
        return found

    def _score(self, token: int, log_prob: float | None, others: tuple[Tensor, Tensor] | None) -> dict[str, Any]:
        """Returns a token with its log-prob and its neighbours'. others: their log-probs [top], and their ids.

        If a token is among its neighbours it gets their number. The two are rounded apart by 1e-6, and lm-eval takes a
        token for the likeliest only if both are equal bit for bit.
        """
        if others is None:
            return {"token": self._text(token), "log_prob": log_prob, "top": {}}
        log_probs, ids = others
        same = log_probs[ids == token]
        if same.numel() and same.isfinite().all():
            log_prob = same[0].item()
        return {"token": self._text(token), "log_prob": log_prob, "top": self._others(log_probs, ids)}

    def _others(self, log_probs: Tensor, ids: Tensor) -> dict[str, float]:
        """Returns text -> log-prob, the largest first. Tokens of one text count with the largest."""
        others: dict[str, float] = {}
        for token, log_prob in zip(ids.tolist(), log_probs.tolist(), strict=True):
            if math.isfinite(log_prob):
                others.setdefault(self._text(token), log_prob)
        return others

    def _text(self, token: int) -> str:
        return self.tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    # -- streams -----------------------------------------------------------------------------------------------------

    async def _stream(
        self, id: str, wanted: CompletionRequest, queue: asyncio.Queue[Any], futures: Sequence[Future]
    ) -> AsyncIterator[bytes]:  # fmt: skip
        try:
            async for event in self._events(id, wanted, queue):
                yield event
        finally:  # also where the client has hung up
            _abandon(futures)

    async def _events(self, id: str, wanted: CompletionRequest, queue: asyncio.Queue[Any]) -> AsyncIterator[bytes]:
        texts = [[_TextDelta(self.tokenizer, sample) for _ in range(sample.count)] for sample in wanted.samples]
        kind = "chat.completion.chunk" if wanted.kind == "chat.completion" else wanted.kind
        first = [sum(sample.count for sample in wanted.samples[:i]) for i in range(len(wanted.samples))]
        left, new = len(wanted.samples), 0
        while left:
            i, what = await queue.get()
            if what is None or isinstance(what, Result):
                error, type = (ENDS, "server_error") if what is None else (_error(what), "invalid_request_error")
                if error is not None:
                    yield _event({"error": {"message": error, "type": type}})
                    yield DONE
                    return
                left -= 1
                continue
            whole = isinstance(what, SampleOutcome)
            completions = what.completions if isinstance(what, SampleOutcome) else what
            for k, one in enumerate(completions):
                new += len(one.tokens) if whole else 0
                piece = texts[i][k](one, whole)
                if piece or whole:
                    reason = ("stop" if one.finished else "length") if whole else None
                    yield _event(_head(id, wanted, kind) | {
                        "choices": [_delta(wanted.kind, first[i] + k, piece, reason)]
                    })  # fmt: skip
        if wanted.usage:
            yield _event(_head(id, wanted, kind) | {"choices": [], "usage": _usage(wanted, new)})
        yield DONE


def _first_of(found: tuple[Tensor, Tensor], place: int, top: int) -> tuple[Tensor, Tensor]:
    """Returns the `top` largest log-probs at a place, and their ids, of `found` [places, at least top]."""
    return found[0][place, :top], found[1][place, :top]


async def _wait_for_disconnect(request: Request, tell: Callable[[Any], None]) -> None:
    """Tells when the client of a read request has hung up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    tell((None, HUNG_UP))


def _abandon(futures: Sequence[Future]) -> None:
    """Nobody waits for these any more."""
    for future in futures:
        future.abandoned = True


def _tell_result(tell: Callable[[Any], None], index: int, future: Future) -> None:
    tell((index, future.result))


def _streamed(sample: DrawSamples, index: int, tell: Callable[[Any], None]) -> PreparedOperation:
    """Returns the operation that tells of a sample's tokens while they come, and of its outcome."""

    def answer(found: SampleOutcome) -> Result:
        tell((index, found))
        return Result(b"{}")

    return PreparedOperation(sample, answer, progress=lambda completions: tell((index, list(completions))))


class _TextDelta:
    """Returns the new part of a text whose tokens come in parts. The possible beginning of a stop text waits."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, sample: DrawSamples) -> None:
        self.new: list[str] = []
        self.text = StreamedText(tokenizer, self.new.append, sample.stop_tokens)
        self.stop, self.shown = sample.stop, 0

    def __call__(self, completion: Completion, whole: bool) -> str:
        (self.text.rest if whole else self.text)(completion.tokens)
        text = _text_before_stop("".join(self.new), self.stop)
        held = 0 if whole else max((len(stop) - 1 for stop in self.stop), default=0)
        piece = text[self.shown : max(self.shown, len(text) - held)]
        self.shown += len(piece)
        return piece


def _text_before_stop(text: str, stop: Sequence[str]) -> str:
    """Returns a text up to the first stop text in it."""
    return text[: min((text.find(each) for each in stop if each in text), default=len(text))]


def _error(result: Result) -> str | None:
    """Returns the error of a result, None if it has none."""
    return json.loads(result.body).get("error")


def _usage(wanted: CompletionRequest, new: int) -> dict[str, int]:
    prompt = sum(len(sample.tokens) for sample in wanted.samples)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _about(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "mrl"}


def _head(id: str, wanted: CompletionRequest, kind: str) -> dict[str, Any]:
    return {"id": id, "object": kind, "created": int(time.time()), "model": wanted.model}


def _delta(kind: Kind, index: int, piece: str, reason: str | None) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": None}
    if kind == "chat.completion":
        return choice | {"delta": {"role": "assistant", "content": piece}}
    return choice | {"text": piece}


def _event(data: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


def _of_chat(scores: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    def about(token: str, log_prob: float) -> dict[str, Any]:
        return {"token": token, "logprob": log_prob, "bytes": list(token.encode())}

    return [
        about(one["token"], one["log_prob"]) | {"top_logprobs": [about(*each) for each in one["top"].items()]}
        for one in scores
    ]


def _of_completion(scores: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    tokens = [one["token"] for one in scores]
    return {
        "tokens": tokens, "token_logprobs": [one["log_prob"] for one in scores],
        "top_logprobs": [one["top"] or None for one in scores],
        "text_offset": list(itertools.accumulate(map(len, tokens), initial=0))[:-1],
    }  # fmt: skip
