"""The ranks of `rollout.ranks` as a sampler: they run the native engine behind the contract of a server.

The program on those ranks is mrl/trainers/rl/rollout_ranks.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from mrl.engine.base import Completion
from mrl.engine.collective import TIMEOUT
from mrl.errors import ServerError
from mrl.rollout.base import SampleRequest
from mrl.rollout.http import HttpClient
from mrl.rollout.server import Server
from mrl.rollout.servers import ServerSampler

TIMEOUT_S = TIMEOUT.total_seconds()
"""Longest wait for an answer, which is a whole rollout. The launcher ends all ranks if one of these dies."""


def request_fields(request: SampleRequest) -> dict[str, Any]:
    """Returns a request as plain data, without `on_token`."""
    fields = dict(vars(request))
    del fields["on_token"]
    return fields | {"sampling": dataclasses.asdict(request.sampling), "tokens": list(request.tokens)}


class RankServer(Server):
    """The sampling ranks. They sample all requests of a call together, so a completion depends on no arrival."""

    takes_all = True
    start_s = None  # they answer when they have loaded the model
    how_to_link = "rollout.backend vllm or sglang, and servers of their own"
    how_to_adapt = how_to_link
    adapters_on = False

    def __init__(self, http: HttpClient) -> None:
        url, _, secret = http.url.rpartition("/")
        super().__init__(HttpClient(url, timeout_s=TIMEOUT_S, key="rollout.ranks", secret=secret))
        self.http.if_slow = "see its log"  # no key has the time
        self.path = ""

    def inspect(self, *, sleeps: bool) -> int | None:
        with self.post("/inspect") as found:
            self.path = found["path"]
            return found["max_length"]

    def sample_all(self, requests: Sequence[SampleRequest], *, adapter: str | None = None) -> list[Completion]:
        with self.post("/sample", {"requests": [request_fields(request) for request in requests]}, tries=1) as made:
            return [Completion(**each) for each in made]

    def complete(self, request: SampleRequest, *, adapter: str | None = None) -> Completion:
        return self.sample_all([request])[0]

    def score(self, tokens: Sequence[int], *, adapter: str | None = None) -> list[float]:
        with self.post("/score", {"tokens": list(tokens)}) as log_probs:
            return log_probs

    def version(self) -> str:
        with self.post("/version") as name:
            return name

    def set_version(self, version: str) -> None:
        self.http.post("/load", {"path": None, "version": version})

    def load(self, path: str, version: str) -> None:
        self.http.post("/load", {"path": path, "version": version})

    def pause(self) -> None:
        """Does nothing: calls are made one after the other."""

    def resume(self) -> None:
        """Does nothing, as `pause`."""

    def sleep(self) -> None:
        """Does nothing: the ranks have devices of their own."""

    def wake(self) -> None:
        """Does nothing, as `sleep`."""

    def _has_none(self, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("there is no link to sampling ranks, and they take no adapters")

    load_adapter = unload_adapter = _has_none
    workers = join = begin = receive = finish = leave = _has_none

    def memory_obstacle(self, device: torch.device, *, named: bool) -> str | None:
        return "sampling ranks take weights as files"


class RankSampler(ServerSampler):
    """Completions from the ranks of `rollout.ranks`, as ServerSampler. The url ends with a secret."""

    server = RankServer

    @property
    def notes(self) -> Sequence[str]:
        return () if self.handover is None else ("rollout.ranks: they get new weights as files",)


def init_ranks(url: str, chosen: Mapping[str, str]) -> None:
    """Makes the sampling ranks build the trainer's layers and load the model. They load after they have answered.

    chosen: the actor's `BaseEngine.chosen`.
    """
    RankServer(HttpClient(url, timeout_s=TIMEOUT_S)).http.post("/init", {"chosen": dict(chosen)}, tries=1)


def end_ranks(url: str) -> None:
    """Ends the program on the sampling ranks, once they have made the call at hand."""
    try:
        RankServer(HttpClient(url, timeout_s=TIMEOUT_S)).http.post("/end", tries=1)
    except ServerError:  # it has ended
        return
