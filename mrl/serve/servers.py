"""Draws samples on inference servers, beside the ranks' work: a snapshot is an adapter that the servers load.

The servers of docs/rollout-servers.md, with the base model and adapters switched on. Scores (log-probs of a prompt, the
likeliest tokens) come from the ranks, so from the very weights that train.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import itertools
import logging
import os
import threading
from collections.abc import Iterator, Sequence

from mrl.config.serve import ServersConfig
from mrl.engine.base import Completion
from mrl.engine.sampling import SamplingKey
from mrl.errors import ServerError, UserError
from mrl.rollout.base import SampleRequest
from mrl.rollout.http import HttpClient, RequestAborted
from mrl.rollout.server import Server
from mrl.rollout.sglang import SGLangServer
from mrl.rollout.vllm import VLLMServer
from mrl.serve.models import SampleOutcome, prompt_number
from mrl.serve.operations import DrawSamples
from mrl.serve.request_queue import QueuedRequest, RequestQueue

KINDS: dict[str, type[Server]] = {"vllm": VLLMServer, "sglang": SGLangServer}
KEY = "serve.servers.urls"
KEPT = 8
"""Adapters that a server has at once, besides those in use."""


@dataclasses.dataclass(frozen=True)
class ServedAdapter:
    """A folder in peft's form. version: of its content."""

    folder: str
    version: float | None = None

    @property
    def name(self) -> str:
        """The servers' name for it."""
        return "mrl-" + hashlib.sha256(f"{self.folder}@{self.version}".encode()).hexdigest()[:16]


class _LoadedAdapters:
    """Tracks the adapters of one server, the one used last at the end."""

    def __init__(self, server: Server) -> None:
        self.server, self.lock = server, threading.Lock()
        self.in_use: collections.OrderedDict[str, int] = collections.OrderedDict()  # name -> requests

    @contextlib.contextmanager
    def using(self, adapter: ServedAdapter, *, anew: bool) -> Iterator[str]:
        """Loads an adapter and keeps it while inside; yields its name on the server. anew: the server has lost it."""
        name, folder = adapter.name, os.path.abspath(adapter.folder)
        with self.lock:
            if name not in self.in_use or anew:
                self._make_room()
                self.server.load_adapter(name, folder)
            self.in_use[name] = self.in_use.pop(name, 0) + 1
        try:
            yield name
        finally:
            with self.lock:
                self.in_use[name] -= 1

    def _make_room(self) -> None:
        idle = [name for name, requests in self.in_use.items() if not requests]
        for name in idle[: max(0, len(self.in_use) - KEPT + 1)]:
            del self.in_use[name]
            with contextlib.suppress(ServerError):  # it was started again and has none
                self.server.unload_adapter(name)


class Servers:
    """The servers of `serve.servers`. Used by the main rank alone."""

    def __init__(self, config: ServersConfig, request_queue: RequestQueue, *, longest: int) -> None:
        """Raises ServerError if one does not answer, or has no room for sequences of `longest` tokens."""
        assert config.kind is not None
        self.request_queue = request_queue
        self.loaded = []
        for url in config.urls:
            server = KINDS[config.kind](HttpClient(url, timeout_s=config.timeout_s, key=KEY))
            room = server.inspect(sleeps=False)
            if room is not None and room < longest:
                raise server.http.error(f"takes sequences of {room} tokens; start it with room for {longest}")
            self.loaded.append(_LoadedAdapters(server))
        self.turns = itertools.cycle(self.loaded)
        self.pool = concurrent.futures.ThreadPoolExecutor(config.concurrency * len(self.loaded), "samples")

    def close(self) -> None:
        """Ends the requests that are under way; their clients ask again."""
        for loaded in self.loaded:
            loaded.server.http.abort_requests()
        self.pool.shutdown(cancel_futures=True)

    @staticmethod
    def can_draw(sample: DrawSamples) -> bool:
        """Returns whether the servers draw a sample; else the ranks do."""
        return not (sample.prompt_log_probs or sample.top_of_prompt or sample.top_of_samples)

    def draw(self, waiting: Sequence[QueuedRequest], adapter: ServedAdapter | None) -> None:
        """Begins to draw samples, and finishes their futures once they are whole. adapter: None is the base."""
        for one in waiting:
            sample: DrawSamples = one.operation.operation
            futures = [self.pool.submit(self._complete, sample, i, adapter) for i in range(sample.count)]
            self.pool.submit(self._finish, one, futures)

    def _finish(self, one: QueuedRequest, futures: Sequence[concurrent.futures.Future[Completion]]) -> None:
        try:
            completions = [future.result() for future in futures]
        except (RequestAborted, concurrent.futures.CancelledError):
            return
        except UserError as error:
            self.request_queue.fail(one.future, "server" if isinstance(error, ServerError) else "user", str(error))
            return
        except Exception:  # an answer that nobody foresaw: without a word the client would wait for ever
            logging.getLogger("mrl.serve").exception("a sample of an inference server")
            self.request_queue.fail(one.future, "server", f"{KEY}: a fault of this server, which its log has")
            return
        if one.operation.progress is not None:
            one.operation.progress(completions)
        self.request_queue.finish(one.future, one.operation.answer(SampleOutcome(completions, None, None, None)))

    def _complete(self, sample: DrawSamples, index: int, adapter: ServedAdapter | None) -> Completion:
        request = SampleRequest(
            tokens=sample.tokens, max_new_tokens=sample.max_new_tokens, sampling=sample.sampling,
            key=SamplingKey(seed=sample.seed, prompt=prompt_number(sample.tokens), sample=index),
            stop_tokens=sample.stop_tokens, stop=sample.stop,
        )  # fmt: skip
        loaded = next(self.turns)
        loaded.server.refuse(sample.sampling)
        if adapter is None:
            return loaded.server.sample(request)
        for anew in (False, True):
            with loaded.using(adapter, anew=anew) as name:
                try:
                    return loaded.server.sample(request, adapter=name)
                except ServerError as error:
                    if error.status not in (400, 404) or anew:  # it may have been started again, and lost its adapters
                        raise
        raise AssertionError("a second try that neither ends nor fails")
