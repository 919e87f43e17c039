"""HTTP servers that answer with recorded traffic, and can be slow, busy, broken or dead."""

from __future__ import annotations

import copy
import http.server
import json
import pathlib
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

TRAFFIC = pathlib.Path(__file__).parent / "traffic"
WEIGHTS = [("a", torch.arange(4.0)), ("b.c", torch.ones(2, 3, dtype=torch.bfloat16))]
Answer = tuple[int, Any]
Fault = Callable[[Any, Answer], Answer | None]
"""`fn(body, recorded) -> answer`; None hangs up. It may sleep first."""


class Replay:
    """One server. faults: by path, what happens to its first requests, one after the other; then it answers as recorded.

    calls: (path, body) as they came. together: most that were under way at a time. Weights are what it was told to load
    last. shared: a list that several servers write (name, path) to.
    """

    def __init__(
        self,
        file: str,
        *,
        name: str = "",
        shared: list[tuple[str, str]] | None = None,
        delay_s: float = 0.0,
        port: int = 0,
    ) -> None:
        self.exchanges = json.loads((TRAFFIC / file).read_text(encoding="utf-8"))
        self.name, self.shared, self.delay_s = name, [] if shared is None else shared, delay_s
        self.faults: dict[str, list[Fault]] = {}
        self.calls: list[tuple[str, Any]] = []
        self.together = self._now = 0
        self.version: str | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        replay = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer("GET", None)

            def do_POST(self) -> None:
                text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.answer("POST", json.loads(text) if text else None)

            def answer(self, method: str, body: Any) -> None:
                told = replay.answer(method, self.path, body)
                if told is None:
                    self.close_connection = True
                    return
                status, content = told
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:  # the client hung up
                    return

            def log_message(self, *_: Any) -> None:
                return

        class Server(http.server.ThreadingHTTPServer):
            request_queue_size = 128

        self._server = Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def answer(self, method: str, path: str, body: Any) -> Answer | None:
        with self._lock:
            self.calls.append((path, body))
            self.shared.append((self.name, path))
            self._now += 1
            self.together = max(self.together, self._now)
            queue = self.faults.get(path)
            fault = queue.pop(0) if queue else None
        try:
            time.sleep(self.delay_s)
            recorded = self._recorded(method, path, body)
            answer = recorded if fault is None else fault(body, recorded)
        finally:
            with self._lock:
                self._now -= 1
        return answer

    def _recorded(self, method: str, path: str, body: Any) -> Answer:
        """Of the exchange with that body (or its `tokens`); where none has it (folders and versions have new names) of the first that succeeded."""
        found = [e for e in self.exchanges if (e["method"], e["path"]) == (method, path)]
        if not found:
            return 404, {"detail": "Not Found"}
        same = [e for e in found if ("tokens" in e and e["tokens"] == body["input_ids"]) or e.get("body") == body]
        if not same and isinstance(body, dict) and "prompt_logprobs" in body:  # a text that was not recorded
            scored = [None, *({str(token): {"logprob": -1.0}} for token in body["prompt"][1:])]
            return 200, {"choices": [{"prompt_logprobs": scored}]}
        assert same or path not in ("/v1/completions", "/generate"), f"{path}: nothing was recorded for {body}"
        exchange = copy.deepcopy((same or [e for e in found if e["status"] == 200])[0])
        answer = exchange["answer"]
        if answer is None:
            return exchange["status"], b""
        if isinstance(body, dict) and exchange["status"] == 200:
            self.version = body.get("new_version", body.get("weight_version", self.version))
        if "weight_version" in answer and self.version is not None:
            answer["weight_version"] = self.version
        return exchange["status"], answer

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def hang(self, body: Any, recorded: Answer) -> Answer | None:
        """A fault: no answer until the server is closed."""
        self._stop.wait(60)
        return None

    def close(self) -> None:
        self._stop.set()
        self._server.shutdown()
        self._server.server_close()


def says(status: int, content: Any) -> Fault:
    return lambda body, recorded: (status, content)


def hang_up(body: Any, recorded: Answer) -> None:
    return None


def changed(change: Callable[[Any], Any]) -> Fault:
    """The recorded answer after `change` of its content in place."""

    def fault(body: Any, recorded: Answer) -> Answer:
        change(recorded[1])
        return recorded

    return fault
