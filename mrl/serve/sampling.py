"""Handles the calls of a sampling client (docs/serve.md). Everything here runs on the thread of the HTTP server."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mrl.data.formats import Chat
from mrl.data.json_text import decode_tool_calls, template_kwargs_of, tools_of
from mrl.data.prompts import TurnEncoder
from mrl.engine.sampling import SamplingParams
from mrl.errors import UserError
from mrl.serve import messages
from mrl.serve.app import ClientRequest, future_response
from mrl.serve.datums import Limits, check_ids
from mrl.serve.ledger import Ledger, SamplerRecord
from mrl.serve.models import SampleOutcome
from mrl.serve.operations import DrawSamples
from mrl.serve.request_queue import PROTOBUF, RequestQueue, Result
from mrl.serve.requests import check_numbers, field, is_ids, number, refuse_fields, seed_of
from mrl.serve.training import PreparedOperation, SamplingQueue, ServedModel

NOT_DONE = ("prompt_alt_tokens_k", "target_prompt_logprobs", "prompt_logprobs_last_n")
EMPTY_LOG_PROB = -99999.0
"""The client's value for a cell without a token."""
MAX_SAMPLES = 4096
MIN_TEMPERATURE = 1e-6
"""Logits that are divided by much less are no numbers in fp32, and their samples none of the model."""


class SamplingHandlers:
    """Handles the calls of a sampling client. end_tokens: they end a completion if the client names none."""

    def __init__(
        self, served: ServedModel, ledger: Ledger, request_queue: RequestQueue, end_tokens: Sequence[int]
    ) -> None:
        self.served, self.ledger, self.request_queue, self.end_tokens = served, ledger, request_queue, end_tokens

    async def create_sampling_session(self, request: ClientRequest) -> Response:
        body = request.json
        session = field(body, "session_id", str)
        if session not in self.ledger.sessions:
            raise UserError("session_id", session, "is no session of this server", "make a new ServiceClient")
        path = field(body, "model_path", str, None)
        id = f"{session}:sample:{number(body, 'sampling_session_seq_id')}"
        if id not in self.ledger.samplers:
            self.ledger.sampler(self._sampler(id, session, path, field(body, "base_model", str, None)))
        return JSONResponse({"sampling_session_id": id, "type": "create_sampling_session"})

    def _sampler(self, id: str, session: str, path: str | None, base: str | None) -> SamplerRecord:
        if path is None:
            if base not in (None, self.served.base):
                raise UserError("base_model", base, "is not served here", f"give {self.served.base}")
            return SamplerRecord(id, session, self.served.base)
        return self.of_save(path, "model_path", id, session)

    def of_save(self, path: str, key: str, id: str = "", session: str = "") -> SamplerRecord:
        """Returns a sampler of a save. key: names it in a message. Raises UserError."""
        saved = self.ledger.find(path)
        if saved.part != "sampler_weights":
            raise UserError(key, path, "has weights to train on alone", "give one of save_weights_for_sampler")
        return SamplerRecord(id, session, saved.base, path=path, saved=saved.time)

    async def sampler(self, request: ClientRequest) -> Response:
        record = self._record(request.path["id"])
        return JSONResponse({"sampler_id": record.id, "base_model": record.base, "model_path": record.path})

    def _record(self, id: str) -> SamplerRecord:
        if id not in self.ledger.samplers:
            raise UserError("sampling_session_id", id, "is no sampler of this server", "make another sampling client")
        return self.ledger.samplers[id]

    async def asample(self, request: ClientRequest) -> Response:
        body = request.json
        record = self._record(field(body, "sampling_session_id", str))
        sample = await run_in_threadpool(self.sample_of, body)  # it may be long, and others are answered meanwhile
        key = ("sample", record.id, number(body, "seq_id", secrets.randbits(60)))

        def answer(found: SampleOutcome) -> Result:
            return Result(as_message(found, sample), PROTOBUF)

        future = self.request_queue.put_batched(source_of(record), key, PreparedOperation(sample, answer))
        return future_response(future, sample_sequence_ids=[f"{future.id}:{i}" for i in range(sample.count)])

    def sample_of(self, body: Mapping[str, Any]) -> DrawSamples:
        """Returns the sample that a client asks for. Raises UserError."""
        refuse_fields(body, NOT_DONE)
        tokens = self._prompt(field(body, "prompt", dict))
        params = field(body, "sampling_params", dict, {})
        room = self.served.limits.length - len(tokens)
        most = number(params, "max_tokens", max(1, room), least=1)
        if most > room:
            fix = f"ask for at most {room}, or raise serve.max_length"
            raise UserError("sampling_params.max_tokens", most, f"is more than fits after {len(tokens)} tokens", fix)
        count = number(body, "num_samples", 1, least=1)
        if count > MAX_SAMPLES:
            raise UserError("num_samples", count, "is too many at once", f"ask for at most {MAX_SAMPLES}")
        stop, stop_tokens = self.stop_conditions(params.get("stop"))
        for name, tokens_of in (("topk_prompt_logprobs", len(tokens)), ("topk_sample_logprobs", count * most)):
            check_numbers(name, self._top(body, name) * tokens_of)
        return DrawSamples(
            tokens, count, most, sampling_of(params), seed_of(params), stop_tokens, stop,
            field(body, "prompt_logprobs", bool, False), self._top(body, "topk_prompt_logprobs"),
            self._top(body, "topk_sample_logprobs"),
        )  # fmt: skip

    def _prompt(self, prompt: Mapping[str, Any]) -> list[int]:
        tokens: list[int] = []
        for i, chunk in enumerate(field(prompt, "chunks", list)):
            where = f"prompt.chunks[{i}]"
            if not isinstance(chunk, dict) or chunk.get("type", "encoded_text") != "encoded_text":
                raise UserError(where, why="is no encoded_text", fix="send token ids: this model reads no images here")
            ids = field(chunk, "tokens", list)
            if not is_ids(ids):
                raise UserError(f"{where}.tokens", why="has what is no token id", fix="send whole numbers")
            tokens += ids
        check_ids(tokens, "prompt", self.served.limits)
        return tokens

    def stop_conditions(self, stop: Any) -> tuple[list[str], list[int]]:
        """Returns (texts, token ids) that end a completion."""
        if stop is None:
            return [], list(self.end_tokens)
        stops = [stop] if isinstance(stop, str) else stop
        if isinstance(stops, list) and is_ids(stops):
            return [], stops
        if isinstance(stops, list) and all(isinstance(each, str) and each for each in stops):
            return stops, list(self.end_tokens)
        raise UserError("sampling_params.stop", stop, "is no text, list of texts or list of token ids", "give one")

    def _top(self, body: Mapping[str, Any], name: str) -> int:
        top = number(body, name, 0)
        if top > self.served.limits.vocab_size:
            raise UserError(name, top, "is above the vocabulary", f"give at most {self.served.limits.vocab_size}")
        return top


def source_of(record: SamplerRecord) -> SamplingQueue:
    """Returns the queue of all samples from one sampler's weights."""
    return SamplingQueue(record.path, record.saved, record.snapshot)


def sampling_of(params: Mapping[str, Any]) -> SamplingParams:
    """Returns how tokens are drawn. Raises UserError."""
    temperature, top_p = field(params, "temperature", float, 1.0), field(params, "top_p", float, 1.0)
    top_k = field(params, "top_k", int, -1)
    if temperature and not MIN_TEMPERATURE <= temperature <= 100:
        fix = f"give 0 for the likeliest token, or {MIN_TEMPERATURE:g} to 100"
        raise UserError("sampling_params.temperature", temperature, "is out of range", fix)
    if not 0 < top_p <= 1:
        raise UserError("sampling_params.top_p", top_p, "is out of range", "give more than 0 and at most 1")
    if top_k < -1:
        raise UserError("sampling_params.top_k", top_k, "is out of range", "give -1 for all, or a number of tokens")
    return SamplingParams(temperature, max(top_k, 0), top_p)


def as_message(found: SampleOutcome, sample: DrawSamples) -> bytes:
    """Returns a `SampleResponse`."""
    out = messages.SampleResponse()
    for i, one in enumerate(found.completions):
        sequence = out.sequences.add(stop_reason=messages.STOP if one.finished else messages.LENGTH)
        sequence.tokens = np.array(one.tokens, "<i4").tobytes()
        sequence.logprobs = np.array(one.log_probs, "<f4").tobytes()
        if found.top_of_samples is not None:
            _fill(sequence.topk_sampled_logprobs, *found.top_of_samples[i], first=False)
    if found.prompt_log_probs is not None:
        out.prompt_logprobs = np.array([math.nan, *found.prompt_log_probs], "<f4").tobytes()
    if sample.top_of_prompt:
        nothing = torch.zeros(0, sample.top_of_prompt)
        _fill(out.topk_prompt_logprobs, *(found.top_of_prompt or (nothing, nothing.long())), first=True)
    return out.SerializeToString()


def _fill(out: Any, log_probs: Tensor, ids: Tensor, *, first: bool) -> None:
    """Fills a `TopkLogprobs`. first: adds empty cells for the first token of a prompt, which has no scores."""
    empty = ~log_probs.isfinite()
    log_probs, ids = log_probs.masked_fill(empty, EMPTY_LOG_PROB), ids.masked_fill(empty, 0)
    if first:
        log_probs = torch.cat([log_probs.new_full((1, log_probs.shape[1]), EMPTY_LOG_PROB), log_probs])
        ids = torch.cat([ids.new_zeros(1, ids.shape[1]), ids])
    out.token_ids = ids.cpu().numpy().astype("<i4").tobytes()
    out.logprobs = log_probs.cpu().float().numpy().astype("<f4").tobytes()
    out.k, out.length = log_probs.shape[1], log_probs.shape[0]


# -- prompts of OpenAI's interface -------------------------------------------------------------------------------------


class Prompts:
    """Turns the prompts and messages of a request into token ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, limits: Limits) -> None:
        self.tokenizer, self.encoder, self.limits = tokenizer, TurnEncoder(tokenizer), limits

    def of_completions(self, body: Mapping[str, Any]) -> list[list[int]]:
        """Returns the ids of each prompt. Raises UserError."""
        special = field(body, "add_special_tokens", bool, True)
        return [self._ids(prompt, special, f"prompt {i}") for i, prompt in enumerate(_prompts(body.get("prompt")))]

    def of_chat(self, body: Mapping[str, Any]) -> list[int]:
        """Returns the ids of messages, with the generation prompt. Raises UserError."""
        row = dict(body)
        messages = field(row, "messages", list)
        if not messages or not all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in messages):
            raise UserError("messages", why="is no list of messages with a role", fix="give one")
        if body.get("tool_choice") not in (None, "auto", "none"):
            raise UserError("tool_choice", body["tool_choice"], "is not done by this server", "leave it out")
        messages = [one | {"content": _text_of(one["content"])} if "content" in one else one for one in messages]
        messages = [decode_tool_calls(one, f"messages[{i}]") for i, one in enumerate(messages)]
        chat = Chat(messages=messages, tools=tools_of(row), template_kwargs=template_kwargs_of(row))
        try:
            ids = self.encoder.prompt(chat)
        except (UserError, ValueError) as error:
            raise UserError("messages", why=f"cannot be rendered: {error}") from None
        check_ids(ids, "messages", self.limits)
        return ids

    def _ids(self, prompt: Any, special: bool, where: str) -> list[int]:
        if isinstance(prompt, str):
            prompt = self.tokenizer(prompt, add_special_tokens=special)["input_ids"]
        check_ids(prompt, where, self.limits)
        return prompt


def _prompts(prompt: Any) -> list[Any]:
    """Returns the prompts of a request: texts, or lists of token ids. Raises UserError."""
    several = [prompt] if _is_one(prompt) else prompt
    if not isinstance(several, list) or not several or not all(map(_is_one, several)):
        raise UserError("prompt", why="is no text, list of texts, or list of token ids", fix="give one")
    return several


def _text_of(content: Any) -> Any:
    """Returns a message's content as chat templates take it: parts of text joined by line ends. Raises UserError."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise UserError("messages", kind, "is a part that this server does not read here", "give parts of text")
    return "\n".join(part["text"] for part in content)


def _is_one(prompt: Any) -> bool:
    return isinstance(prompt, str) or (isinstance(prompt, list) and bool(prompt) and is_ids(prompt))
