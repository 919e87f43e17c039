"""The thread that listens: long and slow bodies of one client hold up no other, and its end answers who waits."""

import contextlib
import http.client
import json
import logging
import re
import socket
import threading
import time

import pytest
from starlette.responses import JSONResponse

from mrl.serve import app
from mrl.serve.app import Auth, HTTPServer, future_response, json_result, make_retrieve_handler, open_socket, route
from mrl.serve.datums import Limits
from mrl.serve.ledger import Ledger
from mrl.serve.openai import OpenAIHandlers
from mrl.serve.request_queue import RequestQueue
from mrl.serve.requests import RequestError, parse_body
from mrl.serve.sampling import SamplingHandlers
from mrl.serve.training import ServedModel
from tests.data.tiny_tokenizers import make_tokenizer

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
