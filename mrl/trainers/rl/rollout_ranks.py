"""The program of the ranks that sample beside training (`rollout.ranks`).

The launcher starts one world. Its last ranks become a world of their own here, and so do the others, on the same store.
The sampling ranks run the actor's engine without an optimizer. Their main process answers HTTP, and each call is made
on all of them together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import json
import os
import queue
import secrets
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from mrl.algorithms.recipes import check_algorithm
from mrl.config.ppo import PPOConfig
from mrl.config.roles import role_configs, sampling_engine
from mrl.data.tokenizer import load_tokenizer
from mrl.engine.collective import call_on_every_rank, is_main, on_main, split_world
from mrl.engine.registry import build_engine
from mrl.engine.sampling import SamplingKey, SamplingParams
from mrl.errors import ConfigError, UserError, first_line
from mrl.ops.devices import device_type
from mrl.roles.dispatch import WorkerDispatch
from mrl.rollout.base import SampleRequest
from mrl.rollout.ranks import end_ranks
from mrl.trainers.rl.roles import role_folder
from mrl.trainers.rl.samplers import actor_log_probs, make_sampler
from mrl.trainers.signals import StopSignal

KEEPALIVE_S = 60.0
"""How long the main process waits for a call before it tells the others that there is none: gloo ends a longer wait."""

ADDRESS = "rollout_ranks"


@contextlib.contextmanager
def joined_worlds(config: PPOConfig) -> Iterator[str | None]:
    """Joins the world of this rank. Gives the url of the sampling ranks, which end afterwards, on ranks that train.

    On a sampling rank it samples until then, and gives None. Without rollout.ranks it gives "".
    """
    if not config.rollout.ranks:
        yield ""
        return
    samples, store = split_world(config.rollout.ranks, device_type(config.actor.engine.device))
    if samples:
        _serve(config, store)
        yield None
        return
    url = store.get(ADDRESS).decode()
    try:
        yield url
    finally:
        if is_main():
            end_ranks(url)


def _serve(config: PPOConfig, store: Any) -> None:
    """Answers calls until one ends it. Collective over the sampling ranks."""
    calls: _Calls | None = None
    if is_main():
        calls = _Calls()
        store.set(ADDRESS, calls.url)
    model = _SampledModel(config)
    watched = False
    with contextlib.ExitStack() as signals:
        while True:
            call = on_main(lambda: calls.next() if calls is not None else None)
            if call is None:
                continue
            name, body = call
            if name == "end":
                return
            if name == "init":
                if calls is not None:
                    calls.answer(None)  # first, so both worlds load their models at once
                model.init(**body)
                continue
            if name == "sample" and not watched:  # the trainer answers signals, and may need what is under way
                signals.enter_context(StopSignal())
                watched = True
            answer: Any = None
            try:
                answer = call_on_every_rank(lambda: getattr(model, f"do_{name}")(**body))  # noqa: B023 (called here)
            except UserError as error:
                answer = error
            except Exception as error:
                if calls is not None:
                    calls.answer(UserError(f"ended by {type(error).__name__}: {first_line(error)}"))
                raise
            if calls is not None:
                calls.answer(answer)


class _SampledModel:
    """The actor's model on the sampling ranks, and what is asked of it. Methods are collective."""

    def __init__(self, config: PPOConfig) -> None:
        self._max_length, self._folder = config.max_length, role_folder(config, "actor")
        role = role_configs(config, {"actor": self._folder, **_other_folders(config)}, check_algorithm(config))["actor"]
        role = dataclasses.replace(
            role, optimizer=None, mtp=None,
            model=dataclasses.replace(role.model, lora=None),
            engine=dataclasses.replace(sampling_engine(config), micro_batch=role.engine.micro_batch),
        )  # fmt: skip
        engine = build_engine(role)
        self._engine, self._dispatch, self._version = engine, WorkerDispatch({"actor": engine}, offload_idle=False), ""
        tokenizer = load_tokenizer(self._folder, config.actor.model.trust_remote_code, config.data.chat_template)
        # It samples by its own engine, as if there were no other ranks.
        rollout = dataclasses.replace(config.rollout, ranks=0, async_level=0)
        with tempfile.TemporaryDirectory() as nothing:
            self._sampler = make_sampler(
                rollout, self._dispatch, tokenizer, folder=self._folder, dtype=config.actor.model.dtype,
                max_length=self._max_length, output_dir=nothing, progress=lambda done, of: None,
            )  # fmt: skip

    def init(self, chosen: Mapping[str, str]) -> None:
        """Builds the layers that the actor trains with, and loads the weights. chosen: its `BaseEngine.chosen`.

        The trainer may have another spec than `auto` is here: of its checkpoint, its layout or its adapters.
        """
        self._engine.keep_choices(chosen)
        own, trained = self._engine.chosen.get("layer_spec"), chosen.get("layer_spec")
        if own != trained:
            why = f"is {trained} on the ranks that train and {own} on those of rollout.ranks"
            fix = "set local, or install the same packages on all hosts"
            raise ConfigError("actor.engine.layer_spec", self._engine.config.engine.layer_spec, why, fix)
        self._engine.init_model()

    def do_inspect(self) -> dict[str, Any]:
        return {"path": self._folder, "max_length": self._max_length}

    def do_sample(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        made = self._sampler.sample([_request(**fields) for fields in requests])
        return [dataclasses.asdict(completion) for completion in made]

    def do_score(self, tokens: list[int]) -> list[float]:
        return actor_log_probs(self._dispatch, tokens)

    def do_version(self) -> str:
        return self._version

    def do_load(self, path: str | None, version: str) -> None:
        if path is not None:
            self._engine.load_hf(path)
        self._version = version


def _other_folders(config: PPOConfig) -> dict[str, str]:
    """Returns a name for the folder of each role beside the actor: no engine is built from it."""
    return dict.fromkeys(("critic", "reference", "reward", *(f"reference.{n}" for n in config.reference.others)), "")


def _request(sampling: dict[str, Any], key: list[int], **fields: Any) -> SampleRequest:
    return SampleRequest(sampling=SamplingParams(**sampling), key=SamplingKey(*key), **fields)


class _Calls:
    """Calls over HTTP, one after the other. On the main process of the sampling ranks."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[tuple[str, dict[str, Any], Future[Any]]] = queue.Queue()
        self._now: Future[Any] = Future()
        calls, secret = self, secrets.token_hex(16)

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                name = self.path.strip("/")
                if self.headers.get("Authorization") != f"Bearer {secret}":
                    self.send_error(403)
                    return
                future: Future[Any] = Future()
                if name == "end":  # nobody waits for the call before it
                    future.set_result(None)
                calls._waiting.put((name, (json.loads(text) if text else None) or {}, future))
                answer = future.result()
                failed = isinstance(answer, UserError)
                data = json.dumps({"error": str(answer)} if failed else answer).encode()
                self.send_response(500 if failed else 200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                return

        host = _own_address()
        self._server = http.server.ThreadingHTTPServer((host, 0), Handler)
        self.url = f"http://{host}:{self._server.server_address[1]}/{secret}"
        threading.Thread(target=self._server.serve_forever, name="mrl-rollout-ranks", daemon=True).start()

    def next(self) -> tuple[str, dict[str, Any]] | None:
        """Returns the next call, with its arguments; None after `KEEPALIVE_S` without one."""
        try:
            name, body, self._now = self._waiting.get(timeout=KEEPALIVE_S)
        except queue.Empty:
            return None
        return name, body

    def answer(self, answer: Any) -> None:
        """Answers the call of `next`."""
        self._now.set_result(answer)


def _own_address() -> str:
    """Returns this machine's address as the main process of the trainer sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))  # which sends nothing, over UDP
        return sock.getsockname()[0]
