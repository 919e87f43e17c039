"""What a sampling client asks for, and what it is answered, without a model.

The thread that listens: long and slow bodies of one client hold up no other, and its end answers who waits.
"""

import asyncio
import contextlib
import dataclasses
import http.client
import json
import logging
import math
import re
import socket
import threading
import time

import numpy as np
import pytest
import torch
from starlette.responses import JSONResponse

from mrl.engine.base import Completion
from mrl.engine.sampling import SamplingParams
from mrl.errors import UserError
from mrl.serve import app, messages
from mrl.serve.app import (
    Auth,
    ClientRequest,
    HTTPServer,
    future_response,
    json_result,
    make_retrieve_handler,
    open_socket,
    route,
)
from mrl.serve.datums import Limits
from mrl.serve.ledger import Ledger, SamplerRecord, SavedRecord
from mrl.serve.models import SampleOutcome
from mrl.serve.openai import OpenAIHandlers, _TextDelta
from mrl.serve.operations import DrawSamples, ModelKind
from mrl.serve.request_queue import RequestQueue
from mrl.serve.requests import RequestError, parse_body
from mrl.serve.sampling import SamplingHandlers, as_message, sampling_of, source_of
from mrl.serve.training import ServedModel
from tests.data.tiny_tokenizers import make_tokenizer

PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}, {"tokens": [3]}]}
PATH = "tinker://s1:train:0/sampler_weights/a"


@pytest.fixture
def sampling(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.session("s1")
    for part in ("sampler_weights", "weights"):
        ledger.save(SavedRecord("s1:train:0", part, "a", ModelKind(4), "base", 7.0, 10))
    ledger.sampler(SamplerRecord("s1:sample:0", "s1", "base", path=PATH, saved=7.0))
    return SamplingHandlers(
        ServedModel("base", "folder", Limits(10, 6), None, 1), ledger, RequestQueue(max_waiting=9), end_tokens=[9]
    )


def asked(sampling, **body):
    return sampling.sample_of({"prompt": PROMPT, **body})


def test_what_is_asked_for(sampling):
    params = {"max_tokens": 3, "seed": 5, "top_k": 4, "top_p": 0.5, "temperature": 0}
    one = asked(sampling, num_samples=2, sampling_params=params)
    assert (one.tokens, one.count, one.max_new_tokens, one.seed) == ([1, 2, 3], 2, 3, 5)
    assert one.sampling == SamplingParams(0.0, 4, 0.5) and (one.stop, one.stop_tokens) == ([], [9])
    default = asked(sampling)
    assert default.sampling == SamplingParams(1.0, 0, 1.0) and (default.count, default.max_new_tokens) == (1, 3)
    assert sampling_of({"top_k": 0}).top_k == 0
    assert asked(sampling).seed != default.seed, "each is drawn anew where no seed is given"
    assert not default.prompt_log_probs and default.top_of_prompt == default.top_of_samples == 0
    more = asked(sampling, prompt_logprobs=True, topk_prompt_logprobs=2, topk_sample_logprobs=3)
    assert (more.prompt_log_probs, more.top_of_prompt, more.top_of_samples) == (True, 2, 3)


@pytest.mark.parametrize(("stop", "texts", "ids"), [
    (None, [], [9]), ([], [], []), ([4, 5], [], [4, 5]), ("end", ["end"], [9]), (["a", "b"], ["a", "b"], [9]),
])  # fmt: skip
def test_what_ends_a_completion(sampling, stop, texts, ids):
    one = asked(sampling, sampling_params={"stop": stop})
    assert (one.stop, one.stop_tokens) == (texts, ids)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"sampling_params": {"max_tokens": 4}}, "max_tokens: value 4 is more than fits after 3 tokens; ask for at most 3"),
        ({"sampling_params": {"temperature": 1e-7}}, "temperature: value 1e-07 is out of range"),
        ({"sampling_params": {"temperature": -1.0}}, "temperature: value -1.0 is out of range"),
        ({"sampling_params": {"temperature": 101.0}}, "temperature: value 101.0 is out of range"),
        ({"sampling_params": {"top_p": 0.0}}, "top_p: value 0.0 is out of range"),
        ({"sampling_params": {"top_k": -2}}, "top_k: value -2 is out of range"),
        ({"sampling_params": {"stop": [""]}}, "stop: value .* is no text"),
        ({"sampling_params": {"stop": [1, "a"]}}, "stop: value .* is no text"),
        ({"num_samples": 0}, "num_samples: value 0 is below 1"),
        ({"num_samples": 4097}, "num_samples: value 4097 is too many at once"),
        ({"topk_prompt_logprobs": 11}, "topk_prompt_logprobs: value 11 is above the vocabulary"),
        ({"prompt_alt_tokens_k": 1}, "prompt_alt_tokens_k: is not done by this server"),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n: is not done"),
        ({"prompt": {"chunks": []}}, "prompt: has no token"),
        ({"prompt": {"chunks": [{"tokens": [1] * 7}]}}, "prompt: has 7 tokens; send at most 6"),
        ({"prompt": {"chunks": [{"tokens": [10]}]}}, "prompt: value 10 is no token"),
        ({"prompt": {"chunks": [{"tokens": [True]}]}}, r"chunks\[0\].tokens: has what is no token id"),
        ({"prompt": {"chunks": [{"type": "image", "data": ""}]}}, r"chunks\[0\]: is no encoded_text"),
    ],
)  # fmt: skip
def test_what_is_refused(sampling, body, says):
    with pytest.raises(UserError, match=says):
        asked(sampling, **body)


def test_more_log_probs_than_an_answer_holds(sampling):
    sampling.served = dataclasses.replace(sampling.served, limits=Limits(10**7, 6))
    with pytest.raises(UserError, match="topk_prompt_logprobs: makes 30000000 numbers; keep to 16777216"):
        asked(sampling, topk_prompt_logprobs=10**7)
    with pytest.raises(UserError, match="topk_sample_logprobs: makes 60000000 numbers"):
        asked(sampling, topk_sample_logprobs=10**7, num_samples=2)
    openai = OpenAIHandlers(sampling, make_tokenizer(), list)
    with pytest.raises(UserError, match="prompt_logprobs: makes 6000000 numbers; keep to 4194304"):
        openai._completions({"model": "base", "prompt": [1, 2, 3], "n": 2, "max_tokens": 3, "prompt_logprobs": 10**6})


def called(handler, **body):
    return json.loads(asyncio.run(handler(ClientRequest(None, b"", body))).body)


def test_a_sample_that_is_sent_again_is_drawn_once(sampling):
    body = {"sampling_session_id": "s1:sample:0", "prompt": PROMPT, "num_samples": 3}
    first = called(sampling.asample, seq_id=1, **body)
    assert called(sampling.asample, seq_id=1, **body) == first and len(set(first["sample_sequence_ids"])) == 3
    assert called(sampling.asample, seq_id=2, **body)["request_id"] != first["request_id"]
    work = sampling.request_queue.next_work(0)
    assert len(work.requests) == 2 and work.queue == source_of(sampling.ledger.samplers["s1:sample:0"])
    assert (work.queue.path, work.queue.saved, work.queue.snapshot) == (PATH, 7.0, None)


def test_samplers(sampling):
    made = called(sampling.create_sampling_session, session_id="s1", sampling_session_seq_id=1, model_path=PATH)
    record = sampling.ledger.samplers[made["sampling_session_id"]]
    assert (record.path, record.saved, record.base) == (PATH, 7.0, "base")
    called(sampling.create_sampling_session, session_id="s1", sampling_session_seq_id=1)
    assert sampling.ledger.samplers[record.id] is record, "it was sent again"
    base = called(sampling.create_sampling_session, session_id="s1", sampling_session_seq_id=2, base_model="base")
    assert sampling.ledger.samplers[base["sampling_session_id"]].path is None
    for body, says in (
        ({"model_path": PATH.replace("sampler_weights", "weights")}, "model_path: value .* has weights to train on alone"),
        ({"model_path": "runs/x"}, "path: value .* is not saved on this server"),
        ({"base_model": "other"}, 'base_model: value "other" is not served here'),
        ({"session_id": "s2"}, 'session_id: value "s2" is no session'),
    ):  # fmt: skip
        with pytest.raises(UserError, match=says):
            called(sampling.create_sampling_session, **{"session_id": "s1", "sampling_session_seq_id": 3, **body})


def test_the_answer():
    sample = DrawSamples([1, 2, 3], 2, 4, SamplingParams(), 0, [], [], True, 2, 1)
    top = torch.tensor([[-0.5, -1.0], [-0.25, -math.inf]]), torch.tensor([[4, 5], [6, 7]])
    of_samples = [(torch.tensor([[-0.1]]), torch.tensor([[8]])), (torch.zeros(0, 1), torch.zeros(0, 1).long())]
    completions = [Completion([8], [-0.1], finished=True), Completion([], [], finished=False)]
    out = messages.SampleResponse.FromString(
        as_message(SampleOutcome(completions, [-1.5, -2.5], top, of_samples), sample)
    )
    assert [one.stop_reason for one in out.sequences] == [messages.STOP, messages.LENGTH]
    assert np.frombuffer(out.sequences[0].tokens, "<i4").tolist() == [8] and out.sequences[1].tokens == b""
    assert np.frombuffer(out.sequences[0].logprobs, "<f4").tolist() == pytest.approx([-0.1])
    np.testing.assert_array_equal(np.frombuffer(out.prompt_logprobs, "<f4"), [math.nan, -1.5, -2.5])
    found = out.topk_prompt_logprobs
    assert (found.k, found.length) == (2, 3)
    assert np.frombuffer(found.logprobs, "<f4").tolist() == [-99999.0, -99999.0, -0.5, -1.0, -0.25, -99999.0]
    assert np.frombuffer(found.token_ids, "<i4").tolist() == [0, 0, 4, 5, 6, 0]
    beside = out.sequences[0].topk_sampled_logprobs
    assert (beside.k, beside.length, np.frombuffer(beside.token_ids, "<i4").tolist()) == (1, 1, [8])
    plain = DrawSamples([1], 1, 1, SamplingParams(), 0, [], [])
    assert not messages.SampleResponse.FromString(
        as_message(SampleOutcome(completions[:1], None, None, None), plain)
    ).HasField("prompt_logprobs")
    of_one = DrawSamples([1], 1, 1, SamplingParams(), 0, [], [], True, 2)
    alone = messages.SampleResponse.FromString(as_message(SampleOutcome(completions[:1], [], None, None), of_one))
    assert (alone.topk_prompt_logprobs.k, alone.topk_prompt_logprobs.length) == (2, 1), (
        "of a prompt of one token nothing is known"
    )


def test_a_text_that_comes_in_parts_ends_before_its_stop():
    """What may begin a stop text waits until it is known; in the end nothing of it was shown."""
    tokenizer = make_tokenizer()
    ids = tokenizer("the quick brown fox", add_special_tokens=False)["input_ids"]
    for stop, expected in (
        (["brown"], "the quick "),
        (["zebra"], "the quick brown fox"),
        (["fox", "quick"], "the "),
        (["quick brown"], "the "),
    ):
        part, shown = _TextDelta(tokenizer, DrawSamples([1], 1, 99, SamplingParams(), 0, [], stop)), ""
        for end in range(1, len(ids) + 1):
            shown += part(Completion(ids[:end], [0.0] * end, finished=False), False)
            assert expected.startswith(shown), (stop, shown)
        assert shown + part(Completion(ids, [0.0] * len(ids), finished=True), True) == expected


def test_a_token_has_the_log_prob_of_its_neighbours_list(sampling):
    auth = OpenAIHandlers(sampling, make_tokenizer(), lambda: ["s1:train:0:3"])
    log_probs, ids = torch.tensor([-0.5, -1.0, -math.inf]), torch.tensor([7, 8, 9])
    assert auth._score(7, -0.50001, (log_probs, ids))["log_prob"] == -0.5
    assert auth._score(11, -3.0, (log_probs, ids))["log_prob"] == -3.0
    assert auth._score(9, -4.0, (log_probs, ids))["log_prob"] == -4.0
    assert list(auth._score(7, 0.0, (log_probs, ids))["top"].values()) == [-0.5, -1.0]
    sampling.ledger.sampler(SamplerRecord("s1:sample:5", "s1", "base", snapshot="s1:train:0:3"))
    sampling.ledger.sampler(SamplerRecord("s1:sample:6", "s1", "base", snapshot="s1:train:0:2"))
    listed = [one["id"] for one in called(auth.models)["data"]]
    assert listed == ["base", PATH, "s1:sample:5"], "saves to sample from, and snapshots that are there"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"n": 1025}, "n: value 1025 makes more than 4096 completions"),
        ({"logprobs": 21}, "logprobs: value 21 is above 20"),
        ({"max_tokens": 5}, "max_tokens: value 5 is more than fits after the 2 tokens of prompt 0"),
        ({"model": PATH.replace("sampler_weights", "weights")}, "model: value .* has weights to train on alone"),
        ({"logit_bias": {"1": 2}}, "logit_bias: is not done"),
        ({"presence_penalty": 0.5}, "presence_penalty: value 0.5 is not done by this server"),
        ({"prompt": []}, "prompt: is no text"),
        ({"stream": True, "echo": True}, "stream: value true does not go with"),
        ({"n": 3, "prompt": [[1], [2], [3], [4], [5], [6], [7], [8], [9], [1]]}, "prompt: is 10 prompts; send at most 9"),
    ],
)  # fmt: skip
def test_what_the_other_door_refuses(sampling, body, says):
    auth = OpenAIHandlers(sampling, make_tokenizer(), list)
    given = {"model": "base", "prompt": [[1, 2], [3], [4], [5]], "max_tokens": 2, **body}
    with pytest.raises(UserError, match=says):
        called(auth.completions, **given)
    assert sampling.request_queue.next_work(0) is None


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"chat_template_kwargs": {"chat_template": "{% for i in range(9) %}{% endfor %}"}}, "chat_template_kwargs.chat_template: is no variable"),
        ({"chat_template_kwargs": {"return_tensors": "pt"}}, "chat_template_kwargs.return_tensors: is no variable"),
        ({"stream": True, "logprobs": True}, "stream: value true does not go with logprobs or echo"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages: value .*image_url.* is a part that this server does not read"),
    ],
)  # fmt: skip
def test_what_is_not_done_of_a_chat_is_said(sampling, more, says):
    """Nothing that arrives is run, and nothing of it goes unread."""
    sampling.served = dataclasses.replace(sampling.served, limits=Limits(400, 64))
    chats = OpenAIHandlers(sampling, make_tokenizer(), list)
    with pytest.raises(UserError, match=says):
        called(chats.chat_completions, model="base", **{"messages": [{"role": "user", "content": "a"}], **more})


HEALTH = "/api/v1/healthz"


class Listening:
    """The handlers over a desk of which nothing is taken, as there is no model."""

    def __init__(self, folder):
        tokenizer, self.request_queue = make_tokenizer(), RequestQueue(max_waiting=100)
        served = ServedModel("m", "m", Limits(len(tokenizer), 64), None, 1)
        sampling = SamplingHandlers(served, Ledger(folder), self.request_queue, [0])
        openai = OpenAIHandlers(sampling, tokenizer, lambda: [])

        async def health(asked):
            return JSONResponse({})

        async def promise(asked):
            return future_response(self.request_queue.put_batched("queue", asked.json["key"], "work"))

        self.listens = open_socket("127.0.0.1", 0)
        auth, of_texts = Auth(None, 2**26), Auth(None, 2**23)
        self.http = HTTPServer(
            [
                route("GET", HEALTH, health, auth),
                route("POST", "/api/v1/asample", sampling.asample, auth),
                route("POST", "/promise", promise, auth),
                route(
                    "POST", "/api/v1/retrieve_future", make_retrieve_handler(self.request_queue, lambda id: None), auth
                ),
                route("POST", "/v1/completions", openai.completions, of_texts),
                route("POST", "/v1/chat/completions", openai.chat_completions, of_texts),
            ],
            self.listens,
        )
        self.http.start()

    def connect(self):
        return http.client.HTTPConnection("127.0.0.1", self.http.port, timeout=60)

    def ask(self, path, body):
        connection = self.connect()
        connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode())
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


@pytest.fixture
def server(tmp_path):
    made = Listening(tmp_path)
    yield made
    made.request_queue.end()
    made.http.stop()


def chat(content, **more):
    return {"model": "m", "messages": [{"role": "user", "content": content}], **more}


LONG = {
    "a text": ("/v1/completions", {"model": "m", "prompt": "a b " * 200_000}, "prompt 0: has .* tokens; send at most 64"),
    "ids": ("/v1/completions", {"model": "m", "prompt": [5] * 1_000_000}, "prompt 0: has 1000000 tokens; send at most 64"),
    "messages": ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "a"}] * 30_000}, "send at most 64"),
    "above the limit": ("/v1/completions", {"model": "m", "prompt": "a" * 2**23}, "the body has more than 8388608 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", LONG)
def test_others_are_answered_beside_a_long_body(server, name):
    """Its text is tokenized on another thread."""
    path, body, says = LONG[name]
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    found, waits = [], []
    other = threading.Thread(target=lambda: found.append(server.ask(path, raw)))
    other.start()
    connection = server.connect()
    while other.is_alive() or not waits:
        began = time.perf_counter()
        connection.request("GET", HEALTH)
        assert connection.getresponse().read()
        waits.append(time.perf_counter() - began)
        other.join(0.01)
    [(status, answer)] = found
    assert status in (400, 404, 413) and re.search(says, answer["detail"]), answer
    assert max(waits) < 1.0


@pytest.mark.parametrize("body", [{"prompt": "\ud800"}, {"user_metadata": {"\ud800": ""}}, {"path": "\udfff"}])
def test_half_of_a_character_is_refused(body):
    with pytest.raises(RequestError, match="is no JSON object of UTF-8"):
        parse_body(json.dumps(body).encode())
    assert parse_body(json.dumps({"a": "\U0001f600\\ud800"}).encode()) == {"a": "\U0001f600\\ud800"}


def test_the_end_answers_who_waits(server, caplog, monkeypatch):
    """Held results, whole answers, streams, and a body that is still on its way: each in words, and no traceback."""
    monkeypatch.setattr(app, "ENDING_S", 0.5)
    _, future = server.ask("/promise", {"key": 1})
    bodies = {
        "/api/v1/retrieve_future": {"request_id": future["request_id"]},
        "/v1/completions": {"model": "m", "prompt": [5, 6], "max_tokens": 4},
        "/v1/chat/completions": chat("a", max_tokens=4, stream=True),
    }
    waiting, held = {}, threading.Semaphore(0)
    tell = server.request_queue.add_callback

    def telling(*what):
        tell(*what)
        held.release()

    monkeypatch.setattr(server.request_queue, "add_callback", telling)
    for path, body in bodies.items():
        waiting[path] = server.connect()
        waiting[path].request("POST", path, json.dumps(body))
        assert held.acquire(timeout=60)
    half = socket.create_connection(("127.0.0.1", server.http.port))
    half.sendall(b"POST /promise HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 99\r\n\r\nhalf")
    stream = waiting["/v1/chat/completions"].getresponse()  # its head has come
    server.request_queue.end()
    server.http.stop()
    held_result, whole = (waiting[path].getresponse() for path in list(bodies)[:2])
    assert (held_result.status, json.loads(held_result.read())["type"]) == (200, "try_again")
    assert whole.status == 503 and b"send it again" in whole.read()
    assert stream.read().endswith(b"data: [DONE]\n\n")
    with contextlib.closing(half):
        half.settimeout(60)
        assert half.recv(65536).startswith(b"HTTP/1.1 503")
    assert not server.http.thread.is_alive()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_is_done_by_the_end_is_told(server):
    """And nobody is held after it."""
    _, done = server.ask("/promise", {"key": 1})
    _, waits = server.ask("/promise", {"key": 2})
    [one, _] = server.request_queue.next_work(1).requests
    server.request_queue.finish(one.future, json_result({"came": 1}))
    server.request_queue.end()
    asked = "/api/v1/retrieve_future"
    assert server.ask(asked, {"request_id": done["request_id"]}) == (200, {"came": 1})
    assert server.ask(asked, {"request_id": waits["request_id"]})[1]["type"] == "try_again"
