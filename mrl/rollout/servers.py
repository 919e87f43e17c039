"""Inference servers as a sampler: they share the requests, and take new weights all together or not at all.

The main process alone talks to them. Every rank gets its answers, errors too. A `Server` is a kind of server: vllm.py
and sglang.py have one each.

handover.py syncs weights. Each set of weights has a name. `sample` asks each server for it before and after, and
another name is an error: the server was started again meanwhile.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mrl.config.ppo import ServerConfig
from mrl.engine.base import Completion
from mrl.engine.collective import OnMain
from mrl.engine.sampling import SamplingParams, noise_key
from mrl.errors import ConfigError, UserError
from mrl.rollout.adapters import PROBE_IDS, AdapterTraining, AdapterWeightSync
from mrl.rollout.base import Sampler, SampleRequest
from mrl.rollout.handover import Receiver, ServerGroup, WeightSync, make_weight_sync
from mrl.rollout.http import HttpClient


@dataclasses.dataclass(frozen=True)
class Probe:
    """A text that the servers are asked about after every hand-over of weights."""

    tokens: Sequence[int]  # ids of the text
    log_probs: Callable[[Sequence[int]], Sequence[float]]
    """Gives the log-probs of `tokens[1:]` at temperature 1 by the trainer's own weights; called on every rank."""
    tolerance: float = 0.1  # largest mean difference: servers round otherwise, most of all in bfloat16


class Server(Receiver):
    """An inference server, as a sampler uses it; methods raise ServerError."""

    @abc.abstractmethod
    def inspect(self, *, sleeps: bool) -> int | None:
        """Finds out what serves there and refuses a server that cannot work.

        Returns the longest sequence, None if the server does not say.
        """

    def refuse(self, sampling: SamplingParams) -> None:  # noqa: B027 (not every server refuses something)
        """Raises ConfigError for parameters whose raw log-probs this server does not give."""

    @abc.abstractmethod
    def complete(self, request: SampleRequest) -> Completion: ...

    @abc.abstractmethod
    def score(self, tokens: Sequence[int]) -> list[float]:
        """Returns log-probs of `tokens[1:]` at temperature 1."""

    @abc.abstractmethod
    def version(self) -> str:
        """Returns the version that `load` or `set_version` was given last."""

    @abc.abstractmethod
    def set_version(self, version: str) -> None:
        """Calls the weights that it has `version` from now on."""

    @abc.abstractmethod
    def sleep(self) -> None: ...

    @abc.abstractmethod
    def wake(self) -> None: ...


class AdapterServer(Server):
    """A server that was started with its own weights, and takes adapters besides.

    adapters_on, most_rank: whether it takes them, and up to which rank (None if it does not say); known after
    `inspect`.
    """

    adapters_on = True
    most_rank: int | None = None
    how_to_adapt: str  # what a server has to be started with, for adapters

    def adapter_names(self) -> list[str]:
        """Returns the names of its adapters: the models behind its own in the list of OpenAI's API."""
        models = self.http.get("/v1/models")
        with answers_of(self, "/v1/models"):
            return [model["id"] for model in models["data"][1:]]

    @abc.abstractmethod
    def score(self, tokens: Sequence[int], *, adapter: str | None = None) -> list[float]:
        """Returns log-probs of `tokens[1:]` at temperature 1. adapter: as in `complete`."""

    @abc.abstractmethod
    def complete(self, request: SampleRequest, *, adapter: str | None = None) -> Completion:
        """Returns a completion. adapter: a name given to `load_adapter`; None is the model without."""

    @abc.abstractmethod
    def load_adapter(self, name: str, folder: str) -> None:
        """Loads the adapter of a folder in peft's form. The server sees the folder under the same path."""

    @abc.abstractmethod
    def unload_adapter(self, name: str) -> None: ...


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


@contextlib.contextmanager
def answers_of(server: Server, path: str) -> Iterator[None]:
    """Turns an error in reading an answer of `path` into a ServerError."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise server.http.error(
            f"{path} answered otherwise than expected ({error!r}); see docs/rollout-servers.md for the versions that "
            "work"
        ) from error


def checked(server: Server, request: SampleRequest, completion: Completion) -> Completion:
    """Returns `completion` if it is as requested; raises ServerError if a server did something else in silence."""
    tokens, log_probs = completion.tokens, completion.log_probs
    what = None
    if not tokens or len(tokens) != len(log_probs) or len(tokens) > request.max_new_tokens:
        what = f"gave {len(tokens)} tokens and {len(log_probs)} log-probs for at most {request.max_new_tokens} tokens"
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
        raise server.http.error(what)
    return completion


class ServerSampler(Sampler):
    """Completions from the servers of `config.urls`, of the kind `server`.

    Collective as any sampler; constructing it is too.

    - weights_dir: a folder of this run alone (`mrl.rollout.weights.weights_dir`)
    - max_length: tokens of the longest sequence
    - adapted: the actor, if `update_weights` gets adapters alone and servers hold the base; None if it gets all weights

    Raises ConfigError or ServerError if a server is not there or not set up for it.
    """

    exact = False
    server: Callable[[HttpClient], AdapterServer]

    def __init__(
        self,
        config: ServerConfig,
        *,
        is_main: bool,
        on_main: OnMain,
        weights_dir: str,
        max_length: int | None = None,
        probe: Probe | None = None,
        device: torch.device = torch.device("cpu"),  # noqa: B008 (nothing changes it)
        adapted: AdapterTraining | None = None,
    ) -> None:
        self._servers = ServerGroup([self.server(HttpClient(url, timeout_s=config.timeout_s)) for url in config.urls])
        self._config, self._probe = config, probe
        self._is_main, self._on_main = is_main, on_main
        self._handover: WeightSync | None = None
        self._version: str | None = None
        self._adapted = adapted
        self._asleep = self._updated = False
        on_main(lambda: self._start(weights_dir, max_length, device))

    def _start(self, weights_dir: str, max_length: int | None, device: torch.device) -> None:
        config = self._config
        for server, longest in zip(
            self._servers, self._servers.map(lambda s: s.inspect(sleeps=config.sleep)), strict=True
        ):
            if max_length is not None and longest is not None and longest < max_length:
                raise ConfigError(
                    "rollout.server.urls",
                    why=(
                        f"{server.http.url} takes {longest} tokens and the longest sequence (data.max_prompt_length + "
                        f"rollout.max_new_tokens) has {max_length}"
                    ),
                    fix="start it for that many",
                )
        if self._adapted is None:
            self._handover = make_weight_sync(self._servers, config, weights_dir, device)
        else:
            text = PROBE_IDS if max_length is None else PROBE_IDS[: max_length - 1]
            self._handover = AdapterWeightSync(self._servers, weights_dir, self._adapted, text)

    @property
    def handover(self) -> str | None:
        """The name of the weight sync, also of one that `auto` chose; None on other processes than the main one."""
        return None if self._handover is None else self._handover.name

    @property
    def notes(self) -> Sequence[str]:
        if self._handover is None:
            return ()
        why = f" ({self._handover.why})" if self._handover.why else ""
        return (f"rollout.server.handover: {self._handover.name}{why}",)

    @property
    def takes_adapters(self) -> bool:
        return self._adapted is not None

    @property
    def _adapter(self) -> str | None:
        """The adapter to name in requests: it has the name of the weights."""
        return None if self._adapted is None else self._version

    # --------------------------------------------------------------------------------------------------- completions

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Returns completions. Raises ServerError, or ConfigError for parameters whose log-probs a server does not
        give."""
        assert self._updated, "update_weights comes before sample"
        self.wake()
        return self._on_main(lambda: self._sample(requests))

    def _sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        for sampling in {request.sampling for request in requests}:
            for server in self._servers:
                server.refuse(sampling)
        self._check_versions()
        todo = collections.deque(enumerate(requests))
        completions: dict[int, Completion] = {}

        def work(server: AdapterServer) -> None:
            while True:
                try:
                    index, request = todo.popleft()
                except IndexError:
                    return
                completions[index] = checked(server, request, server.complete(request, adapter=self._adapter))

        lines = min(self._config.concurrency, math.ceil(len(requests) / len(self._servers)))
        self._servers.call_all([functools.partial(work, server) for _ in range(lines) for server in self._servers])
        self._check_versions()
        return [completions[index] for index in range(len(requests))]

    def _check_versions(self) -> None:
        for server, version in zip(self._servers, self._servers.map(lambda s: s.version()), strict=True):
            if version != self._version:
                raise server.http.error(
                    f"has the weights {version!r} and not {self._version!r} of this run: it was started again, or "
                    "another run uses it; run the same command again, with servers of its own"
                )

    def log_probs(self, tokens: Sequence[int]) -> list[list[float]]:
        """Returns log-probs of `tokens[1:]` at temperature 1, from each server. Collective."""
        return self._on_main(lambda: self._servers.map(lambda s: s.score(tokens, adapter=self._adapter)))

    # ------------------------------------------------------------------------------------------------------- weights

    def update_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Gives all servers the new weights.

        After an error (ServerError) those that can be reached have the old ones, or stay paused.
        """
        self.wake()
        version, error = "", None
        if self._is_main:
            assert self._handover is not None
            try:
                version = self._handover.send(weights)
            except UserError as caught:
                error = caught
        else:
            for _ in weights:
                pass
        self._on_main(lambda: self._took(version, error))
        self._updated = True
        probe = self._probe
        if probe is not None:
            expected = list(probe.log_probs(probe.tokens))
            self._on_main(lambda: self._check_probe(probe, expected))

    def _took(self, version: str, error: UserError | None) -> None:
        if error is not None:
            raise error
        self._version = version

    def _check_probe(self, probe: Probe, expected: list[float]) -> None:
        scores = self._servers.map(lambda s: s.score(probe.tokens, adapter=self._adapter))
        for server, found in zip(self._servers, scores, strict=True):
            gap = sum(abs(a - b) for a, b in zip(expected, found, strict=True)) / len(expected)
            if not gap <= probe.tolerance:
                raise server.http.error(
                    f"gives log-probs that differ from the trainer's by {gap:.3g} per token (at most "
                    f"{probe.tolerance:g} is let pass); does it serve the model of actor.model.path?"
                )

    # ------------------------------------------------------------------------------------------------------ lifetime

    def sleep(self) -> None:
        if self._config.sleep and not self._asleep:
            self._on_main(lambda: self._servers.map(lambda s: s.sleep()))
            self._asleep = True

    def wake(self) -> None:
        if self._asleep:
            self._on_main(lambda: self._servers.map(lambda s: s.wake()))
            self._asleep = False

    def close(self) -> None:
        """Removes the files of weight syncs. The servers stay: they were not started here."""
        if self._handover is not None:
            self._handover.close()
