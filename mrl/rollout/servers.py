"""Inference servers as a sampler: they share the requests, and take new weights all together or not at all.

The main process alone talks to them. Every rank gets its answers, errors too. A `Server` is a kind of server: vllm.py
and sglang.py have one each.

handover.py syncs weights. Each set of weights has a name. `sample` asks each server for it before and after, and
another name is an error: the server was started again meanwhile.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from mrl.config.ppo import ServerConfig
from mrl.engine.base import Completion
from mrl.engine.collective import OnMain
from mrl.errors import ConfigError, UserError
from mrl.rollout.adapters import PROBE_IDS, AdapterTraining, AdapterWeightSync
from mrl.rollout.base import Sampler, SampleRequest
from mrl.rollout.handover import WeightSync, make_weight_sync
from mrl.rollout.http import HttpClient
from mrl.rollout.server import Server, ServerGroup


@dataclasses.dataclass(frozen=True)
class Probe:
    """A text that the servers are asked about after every weight sync."""

    tokens: Sequence[int]  # ids of the text
    log_probs: Callable[[Sequence[int]], Sequence[float]]
    """Gives the log-probs of `tokens[1:]` at temperature 1 by the trainer's own weights; called on every rank."""
    tolerance: float = 0.1  # largest mean difference: servers round otherwise, most of all in bfloat16


class ServerSampler(Sampler):
    """Completions from the servers of `config.urls`, of the kind `server`.

    Collective as any sampler; constructing it is too.

    - weights_dir: a folder of this run alone (`mrl.rollout.weights.weights_dir`)
    - max_length: tokens of the longest sequence
    - adapted: the actor, if `update_weights` gets adapters alone and servers hold the base; None if it gets all weights

    Raises ConfigError or ServerError if a server is not there or not set up for it.
    """

    exact = False
    server: Callable[[HttpClient], Server]

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
        lengths = self._servers.map(lambda s: s.inspect(sleeps=config.sleep))
        for server, longest in zip(self._servers, lengths, strict=True):
            if max_length is not None and longest is not None and longest < max_length:
                why = (
                    f"{server.http.url} takes {longest} tokens and the longest sequence (data.max_prompt_length + "
                    f"rollout.max_new_tokens) has {max_length}"
                )
                raise ConfigError("rollout.server.urls", why=why, fix="start it for that many")
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

        def work(server: Server) -> None:
            while True:
                try:
                    index, request = todo.popleft()
                except IndexError:
                    return
                completions[index] = server.sample(request, adapter=self._adapter)

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
