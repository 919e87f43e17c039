"""A server of vLLM's API around a transformers model: it samples from the weights that it was given last.

Each completion is computed alone, with a generator of its own seed, so it is the same in any order. seconds: it waits so
long before each answer; a negative number is the most of a random wait.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import random
import socket
import threading
import time
import urllib.request
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.engine.harness import PRELOAD


@torch.no_grad()
def complete(model: Any, body: dict[str, Any]) -> dict[str, Any]:
    """A choice of `/v1/completions`: tokens with their log-probs after the temperature, or those of the prompt."""
    tokens = list(body["prompt"])
    if "prompt_logprobs" in body:
        log_probs = model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
        given = [{str(token): {"logprob": float(log_probs[i, token])}} for i, token in enumerate(tokens[1:])]
        return {"finish_reason": "length", "prompt_logprobs": [None, *given]}
    generator = torch.Generator().manual_seed(body["seed"] % 2**63)
    new, values, reason = [], [], "length"
    while len(new) < body["max_tokens"] and reason == "length":
        logits = model(torch.tensor([tokens + new])).logits[0, -1].double()
        temperature = body["temperature"]
        log_probs = (logits / (temperature or 1.0)).log_softmax(-1)
        token = int(torch.multinomial(log_probs.exp(), 1, generator=generator)) if temperature else int(logits.argmax())
        new.append(token)
        values.append(float(log_probs[token]))
        if token in body["stop_token_ids"]:
            reason = "stop"
    return {"finish_reason": reason, "token_ids": new, "logprobs": {"token_logprobs": values}}


class PolicyServer:
    """What answers; `model` is a folder."""

    def __init__(self, model: str, seconds: float = 0.0) -> None:
        self.path, self.seconds, self.version = model, seconds, "default"
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.adapted: dict[str, Any] = {}  # models with adapters, by name
        self.lock = threading.Lock()

    def answer(self, path: str, body: Any) -> Any:
        path = path.partition("?")[0]
        if path == "/v1/models":
            own = {"id": "policy", "root": self.path, "max_model_len": 512}
            return {"data": [own, *({"id": name} for name in list(self.adapted))]}
        if path == "/server_info":
            config = {"logprobs_mode": "processed_logprobs", "enable_sleep_mode": False}
            lora = {"max_lora_rank": 16, "max_loras": 2}
            return {"vllm_config": {"model_config": config, "device_config": {"device": "cuda"}, "lora_config": lora}}
        if path == "/weight_info":
            return {"weight_version": self.version}
        if path == "/v1/completions":
            if "prompt_logprobs" not in body:
                time.sleep(self.seconds if self.seconds >= 0 else -self.seconds * random.random())
            model = self.adapted.get(body["model"], None if body["model"].startswith("mrl-") else self.model)
            if model is None:
                return None
            with self.lock:
                return {"choices": [complete(model, body)]}
        if path == "/hang":
            time.sleep(600)
        if path == "/v1/load_lora_adapter":
            base = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
            adapted = PeftModel.from_pretrained(base, body["lora_path"]).merge_and_unload().eval()
            self.adapted[body["lora_name"]] = adapted
        if path == "/v1/unload_lora_adapter":
            del self.adapted[body["lora_name"]]
        if path == "/collective_rpc":
            with self.lock:
                self.load(body["kwargs"]["weights_path"])
        if path == "/update_weight_version":
            self.version = body["new_version"]
        return {"success": True, "results": []}

    def load(self, folder: str) -> None:
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(pathlib.Path(folder).glob("*.safetensors")):
            tensors |= load_file(file)
        missing, unexpected = self.model.load_state_dict(tensors, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)

    def send(self, handler: http.server.BaseHTTPRequestHandler, answer: Any) -> None:
        data = json.dumps(answer).encode()
        with contextlib.suppress(OSError):  # the client hung up
            handler.send_response(404 if answer is None else 200)
            handler.send_header("Content-Length", str(len(data)))
            handler.end_headers()
            handler.wfile.write(data)


def listen(policy: PolicyServer, port: int = 0) -> http.server.ThreadingHTTPServer:
    """What gives the policy's answers once it serves, on a free port if `port` is 0."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.reply(None)

        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.reply(json.loads(text) if text else None)

        def reply(self, body: Any) -> None:
            policy.send(self, policy.answer(self.path, body))

        def log_message(self, *_: Any) -> None:
            return

    class Server(http.server.ThreadingHTTPServer):
        request_queue_size = 128

    return Server(("127.0.0.1", port), Handler)


def serve(model: str, port: int, seconds: float) -> None:
    """Serves until the process that has started this one ends."""
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    if parent is not None:
        ended = [parent.sentinel]
        threading.Thread(target=lambda: multiprocessing.connection.wait(ended) and os._exit(0), daemon=True).start()
    listen(PolicyServer(model, seconds), port).serve_forever()


class Running:
    """A server in a process of its own, forked from one that has imported what it needs."""

    def __init__(self, model: str | pathlib.Path, seconds: float = 0.0, port: int = 0) -> None:
        if not port:
            with socket.socket() as listener:
                listener.bind(("127.0.0.1", 0))
                port = listener.getsockname()[1]
        self.port, self.url = port, f"http://127.0.0.1:{port}"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOAD))
        self.process = context.Process(target=serve, args=(str(model), port, seconds), daemon=True)
        self.process.start()
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{self.url}/weight_info").read()
                return
            except OSError:
                assert self.process.is_alive(), "the server has ended"
                time.sleep(0.1)
        raise TimeoutError(self.url)

    def close(self) -> None:
        self.process.kill()
        self.process.join()
