"""An inference server, as a sampler uses it and as new weights come to it; and a group of such servers."""

from __future__ import annotations

import abc
import concurrent.futures
import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

import torch

from mrl.engine.base import Completion
from mrl.engine.links import Link, LinkBroken, SharedMemoryLink
from mrl.engine.sampling import SamplingParams, noise_key
from mrl.errors import ServerError, first_line
from mrl.rollout.base import SampleRequest
from mrl.rollout.http import TRIES, HttpClient, RequestAborted

KEY = "rollout.server.handover"
INCOMPLETE = "incomplete"
"""A server's name for its weights while new ones are on their way through a link."""

LAST_WORDS_S = 5.0
"""Longest wait for a server's words on a failure, once another one has failed."""

T = TypeVar("T")


def seed_of(request: SampleRequest) -> int:
    """Returns 63 bits of the request's key and length: each sample and each turn has noise of its own."""
    return noise_key(request.key, len(request.tokens)) >> 1


def common_fields(request: SampleRequest) -> dict[str, Any]:
    """Returns a request's parameters that vLLM and SGLang call the same."""
    sampling = request.sampling
    return {
        "temperature": sampling.temperature,
        "top_p": 1.0 if sampling.greedy else sampling.top_p,
        "min_p": 0.0 if sampling.greedy else sampling.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": list(request.stop),
        "stop_token_ids": list(request.stop_tokens),
        "skip_special_tokens": False,
    }


class Server(abc.ABC):
    """One inference server, started with weights of its own. Methods raise ServerError.

    `path`: where its own weights came from. Methods from `workers` to `leave` are for the links in `links` alone.
    Those with an adapter are for servers that take adapters besides their weights.
    """

    path: str
    links: frozenset[str] = frozenset()  # some of links.LINKS; known after `inspect`
    greets = False  # its processes at a link are mrl's own, which say when they have met
    how_to_link = "its kind of server has none"  # the options that a server needs for links
    adapters_on = True  # whether it takes adapters; known after `inspect`, as is the next one
    most_adapters: int | None = None  # that it samples with at a time; None if it does not say
    how_to_adapt: str  # the options that a server needs for adapters
    vocab_size: int | None = None  # of the actor's model; None if unknown
    start_s: float | None = 50.0  # longest wait for each answer of `inspect`; None for the configured one
    takes_all = False  # `sample_all` wants all requests of a rollout at once

    def __init__(self, http: HttpClient) -> None:
        self.http = http

    @abc.abstractmethod
    def inspect(self, *, sleeps: bool) -> int | None:
        """Finds out what serves there and refuses a server that cannot work.

        Returns the longest sequence, None if the server does not say.
        """

    @contextlib.contextmanager
    def get(self, path: str) -> Iterator[Any]:
        """Yields the answer to a GET. An error in reading it inside becomes a ServerError."""
        with self._reading(path):
            yield self.http.get(path)

    @contextlib.contextmanager
    def post(self, path: str, body: Any = None, *, tries: int = TRIES) -> Iterator[Any]:
        """Yields the answer to a POST. An error in reading it inside becomes a ServerError."""
        with self._reading(path):
            yield self.http.post(path, body, tries=tries)

    @contextlib.contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        try:
            yield
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise self.http.error(
                f"{path} answered otherwise than expected ({error!r}); see docs/rollout-servers.md for the versions "
                "that work"
            ) from error

    # ------------------------------------------------------------------------------------------------------- sampling

    def refuse(self, sampling: SamplingParams) -> None:  # noqa: B027 (not every server refuses something)
        """Raises ConfigError for parameters whose raw log-probs this server does not give."""

    @abc.abstractmethod
    def complete(self, request: SampleRequest, *, adapter: str | None = None) -> Completion:
        """Returns a completion. adapter: a name given to `load_adapter`; None is the model without."""

    def sample(self, request: SampleRequest, *, adapter: str | None = None) -> Completion:
        """Returns the completion of `complete`. Raises ServerError if the server did something else in silence."""
        completion = self.complete(request, adapter=adapter)
        tokens, log_probs = completion.tokens, completion.log_probs
        what = None
        if not tokens or len(tokens) != len(log_probs) or len(tokens) > request.max_new_tokens:
            what = (
                f"gave {len(tokens)} tokens and {len(log_probs)} log-probs for at most {request.max_new_tokens} tokens"
            )
        elif self.vocab_size is not None and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            odd = max(tokens) if min(tokens) >= 0 else min(tokens)
            what = f"gave the token {odd}, and the actor's model has {self.vocab_size}; does it serve that model?"
        elif not all(map(math.isfinite, log_probs)):
            what = "gave a log-prob that is not finite; its weights or its dtype may be at fault"
        elif not completion.finished and len(tokens) < request.max_new_tokens:
            what = (
                f"ended a completion after {len(tokens)} of {request.max_new_tokens} tokens; start it with room for "
                f"{len(request.tokens) + request.max_new_tokens} tokens and without limits of its own"
            )
        elif completion.finished and not request.stop and tokens[-1] not in request.stop_tokens:
            what = f"ended a completion at token {tokens[-1]}, which is none of {sorted(request.stop_tokens)}"
        if what is not None:
            raise self.http.error(what)
        return completion

    def sample_all(self, requests: Sequence[SampleRequest], *, adapter: str | None = None) -> list[Completion]:
        """Returns completions in the order of the requests, as `sample`."""
        return [self.sample(request, adapter=adapter) for request in requests]

    @abc.abstractmethod
    def score(self, tokens: Sequence[int], *, adapter: str | None = None) -> list[float]:
        """Returns log-probs of `tokens[1:]` at temperature 1. adapter: as in `complete`."""

    @abc.abstractmethod
    def version(self) -> str:
        """Returns the version that `load` or `set_version` was given last."""

    @abc.abstractmethod
    def set_version(self, version: str) -> None:
        """Calls its present weights `version`."""

    @abc.abstractmethod
    def sleep(self) -> None: ...

    @abc.abstractmethod
    def wake(self) -> None: ...

    # ------------------------------------------------------------------------------------------------------- adapters

    def adapter_names(self) -> list[str]:
        """Returns the names of its adapters: the models behind its own in the list of OpenAI's API."""
        with self.get("/v1/models") as models:
            return [model["id"] for model in models["data"][1:]]

    @abc.abstractmethod
    def load_adapter(self, name: str, folder: str) -> None:
        """Loads the adapter of a folder in peft's form. The server sees the folder under the same path."""

    @abc.abstractmethod
    def unload_adapter(self, name: str) -> None: ...

    # ---------------------------------------------------------------------------------------------------- new weights

    @abc.abstractmethod
    def pause(self) -> None:
        """Stops sampling until `resume`: nothing is sampled from when this returns."""

    @abc.abstractmethod
    def resume(self) -> None: ...

    def check_names(self, names: Collection[str]) -> None:  # noqa: B027 (most can take all)
        """Refuses weights of these names if `load` would give a wrong model."""

    @abc.abstractmethod
    def load(self, path: str, version: str) -> None:
        """Takes the weights in the folder and forgets results of older ones. Only while it is paused."""

    @abc.abstractmethod
    def workers(self) -> int:
        """Returns the number of processes that a link has to reach."""

    @abc.abstractmethod
    def memory_obstacle(self, device: torch.device, *, named: bool) -> str | None:
        """Returns why its processes do not see memory of `device`, for `ipc` alone; None if they do.

        named: `ipc` is asked for by its name. That decides for a server that does not say.
        """

    def memory_link(self, device: torch.device, servers: ServerGroup) -> Link:
        """Returns the link `ipc` for servers of this kind."""
        return SharedMemoryLink(device, len(servers))

    @abc.abstractmethod
    def join(self, offer: dict[str, Any]) -> None:
        """Takes its processes into a link, and out of the one before."""

    @abc.abstractmethod
    def begin(self) -> None:
        """Makes ready for buckets of new weights; its weights are `INCOMPLETE` from now on. Only while it is paused."""

    @abc.abstractmethod
    def receive(self, bucket: dict[str, Any]) -> None:
        """Takes a bucket from the link. bucket: what `links.Link.describe` returns for this server."""

    @abc.abstractmethod
    def finish(self, version: str) -> None:
        """Takes the weights as whole, and forgets results of older ones."""

    @abc.abstractmethod
    def leave(self) -> None:
        """Takes its processes out of the link, also in the middle of a bucket that does not come."""


class ServerGroup(tuple[Server, ...]):
    """Calls several servers at the same time."""

    def map(self, call: Callable[[Server], T]) -> list[T]:
        """Makes `call` for each server at the same time. Returns the results when all have ended, or raises the first
        error."""
        return [future.result() for future in self._ended(call)]

    def outcomes(self, call: Callable[[Server], T]) -> list[T | ServerError]:
        """Calls like `map`, with a ServerError as the result of its server."""
        outcomes: list[T | ServerError] = []
        for future in self._ended(call):
            try:
                outcomes.append(future.result())
            except ServerError as error:
                outcomes.append(error)
        return outcomes

    def _ended(self, call: Callable[[Server], T]) -> list[concurrent.futures.Future[T]]:
        with concurrent.futures.ThreadPoolExecutor(len(self)) as pool:
            return [pool.submit(call, server) for server in self]

    def call_all(self, calls: Sequence[Callable[[], None]]) -> None:
        """Makes all calls at the same time. At the first error the others are ended, and it is raised."""
        with concurrent.futures.ThreadPoolExecutor(len(calls) or 1) as pool:
            futures = [pool.submit(call) for call in calls]
            try:
                for future in concurrent.futures.as_completed(futures):
                    future.result()
            except BaseException:
                self.abort_requests()
                raise
            finally:
                concurrent.futures.wait(futures)
                self.allow_requests()

    def abort_requests(self) -> None:
        """Ends all requests that are under way; they raise RequestAborted."""
        for server in self:
            server.http.abort_requests()

    def allow_requests(self) -> None:
        for server in self:
            server.http.allow_requests()

    def call_within(self, seconds: float, call: Callable[[Server], None]) -> None:
        """Makes `call` for each server, and ends those that take longer. Errors are ignored."""
        with concurrent.futures.ThreadPoolExecutor(len(self)) as pool:
            futures = [pool.submit(call, server) for server in self]
            concurrent.futures.wait(futures, seconds)
            self.abort_requests()
        self.allow_requests()

    def call_while(self, call: Callable[[Server], None], act: Callable[[Callable[[], bool]], None]) -> None:
        """Makes `call` for each server while `act` runs; returns when all have ended. Raises the first error.

        act: is given a function that says whether a server has failed. It then ends without waiting for the server. If
        `act` raises LinkBroken, a server most likely knows the reason, so its words are awaited for a while. Then
        requests that are under way are ended.
        """
        broken: LinkBroken | None = None
        with concurrent.futures.ThreadPoolExecutor(len(self)) as pool:
            futures = [pool.submit(call, server) for server in self]

            def failed() -> bool:
                return any(future.done() and future.exception() is not None for future in futures)

            try:
                act(failed)
            except LinkBroken as error:
                broken = error
            until = None if broken is None else LAST_WORDS_S
            concurrent.futures.wait(futures, until, return_when=concurrent.futures.FIRST_EXCEPTION)
            if broken is not None or failed():
                concurrent.futures.wait(futures, LAST_WORDS_S if failed() else 0)
                self.abort_requests()
        self.allow_requests()
        for failure in [future.exception() for future in futures]:
            if failure is not None and not isinstance(failure, RequestAborted):
                raise failure
        if broken is not None:
            urls = ", ".join(server.http.url for server in self)
            raise ServerError(f"{KEY}: the link to {urls} broke ({first_line(broken)}); see the servers' logs")
