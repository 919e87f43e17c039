"""Inference servers as a sampler: they share the requests, and take new weights all together or not at all.

The main process alone talks to them, through a `Fleet`. `ServerSampler` gives its answers and errors to every rank. A
`Server` is a kind of server: vllm.py and sglang.py have one each.

handover.py syncs weights. Each set of weights has a name. `sample` asks each server for it before and after, and
another name is an error: the server was started again meanwhile.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

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
from mrl.words import pluralize

ASYNC_KEY = "rollout.async_level"


@dataclasses.dataclass(frozen=True)
class Probe:
    """A text that the servers are asked about after every weight sync."""

    tokens: Sequence[int]  # ids of the text
    log_probs: Callable[[Sequence[int]], Sequence[float]]
    """Gives the log-probs of `tokens[1:]` at temperature 1 by the trainer's own weights; called on every rank."""
    tolerance: float = 0.1  # largest mean difference: servers round otherwise, most of all in bfloat16


class Fleet:
    """The servers of `config.urls`, which share requests. On the main process alone.

    - server: the kind of server
    - weights_dir: a folder of this run alone (`mrl.rollout.weights.weights_dir`)
    - max_length: tokens of the longest sequence
    - device: the actor's
    - adapted: the actor, if `send` gets adapters alone and servers hold the base; None if it gets all weights
    - ahead: the rollouts that are sampled while others train. `samplers` has one for each, behind one of the newest
      weights

    Raises ConfigError or ServerError if a server is not there or not set up for it.
    """

    def __init__(
        self,
        server: Callable[[HttpClient], Server],
        config: ServerConfig,
        *,
        weights_dir: str,
        max_length: int | None,
        device: torch.device,
        adapted: AdapterTraining | None,
        ahead: int = 0,
    ) -> None:
        self._config, self.concurrency, self.takes_adapters = config, config.concurrency, adapted is not None
        self.version: str | None = None  # the servers' name for the newest weights
        self._servers = ServerGroup([server(self._client(url)) for url in config.urls])
        self.samplers = [FleetSampler(self, self._servers)]
        self.slots = {url: threading.BoundedSemaphore(config.concurrency) for url in config.urls}
        self.probe_gap = 0.0  # of the last probe, the largest mean difference of a server
        lengths = self._servers.map(lambda s: s.inspect(sleeps=config.sleep))
        for one, longest in zip(self._servers, lengths, strict=True):
            if max_length is not None and longest is not None and longest < max_length:
                why = (
                    f"{one.http.url} takes {longest} tokens and the longest sequence (data.max_prompt_length + "
                    f"rollout.max_new_tokens) has {max_length}"
                )
                raise ConfigError("rollout.server.urls", why=why, fix="start it for that many")
        self.handover: WeightSync
        if adapted is None:
            self.handover = make_weight_sync(self._servers, config, weights_dir, device)
        else:
            text = PROBE_IDS if max_length is None else PROBE_IDS[: max_length - 1]
            in_use = self._held if ahead else None
            self.handover = AdapterWeightSync(self._servers, weights_dir, adapted, text, in_use)
            self._check_room(ahead)
        for _ in range(ahead):
            self.samplers.append(FleetSampler(self, ServerGroup([self._connect(each) for each in self._servers])))

    def _client(self, url: str) -> HttpClient:
        return HttpClient(url, timeout_s=self._config.timeout_s)

    def _check_room(self, adapters: int) -> None:
        for server in self._servers:
            if server.most_adapters is not None and server.most_adapters < adapters:
                why = (
                    f"samples with {adapters} adapters at a time, and {server.http.url} takes {server.most_adapters}: "
                    "it would hold requests back"
                )
                raise ConfigError(ASYNC_KEY, adapters, why, f"start it with --max-loras {adapters} or more")

    def _connect(self, server: Server) -> Server:
        """Returns a client of the same server whose requests end apart from those of others."""
        other = copy.copy(server)
        other.http = self._client(server.http.url)
        return other

    def _held(self) -> set[str]:
        """Returns the names of weights that are newest, or that a rollout is sampled with."""
        return {name for name in (self.version, *(sampler.held for sampler in self.samplers)) if name is not None}

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Returns completions by the newest weights, as `FleetSampler.sample`."""
        return self.samplers[0].sample(requests)

    def log_probs(self, tokens: Sequence[int]) -> list[list[float]]:
        """Returns log-probs of `tokens[1:]` at temperature 1 and the newest weights, from each server."""
        adapter = self.version if self.takes_adapters else None
        return self._servers.map(lambda s: s.score(tokens, adapter=adapter))

    def waits_for(self) -> str:
        """Says which servers are asked, and how many requests none of them has yet."""
        urls, waiting = ", ".join(server.http.url for server in self._servers), sum(s.waiting for s in self.samplers)
        return f"{urls} still answer(s), and {pluralize(waiting, 'request')} wait(s)"

    def abort(self) -> None:
        """Ends requests for completions that are under way. They raise RequestAborted."""
        for sampler in self.samplers:
            sampler.servers.abort_requests()

    def allow(self) -> None:
        """Lets requests be made again after `abort`."""
        for sampler in self.samplers:
            sampler.servers.allow_requests()

    def send(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Gives all servers the new weights, as `WeightSync.send`."""
        self.version = self.handover.send(weights)

    def send_adapter_files(self, files: Mapping[str, bytes]) -> None:
        """Gives all servers adapters of `adapter_files`."""
        assert isinstance(self.handover, AdapterWeightSync), "servers get whole weights"
        self.version = self.handover.send_files(files)

    def adapter_files(self, version: str) -> dict[str, bytes] | None:
        """Returns the files of adapters that servers have; None if they get whole weights."""
        return self.handover.files(version) if isinstance(self.handover, AdapterWeightSync) else None

    def check_probe(self, probe: Probe, expected: Sequence[float]) -> None:
        """Raises ServerError if a server's log-probs of the probe are not about the `expected` ones."""
        self.probe_gap = 0.0
        for server, found in zip(self._servers, self.log_probs(probe.tokens), strict=True):
            gap = sum(abs(a - b) for a, b in zip(expected, found, strict=True)) / len(expected)
            self.probe_gap = max(self.probe_gap, gap)
            if not gap <= probe.tolerance:
                raise server.http.error(
                    f"gives log-probs that differ from the trainer's by {gap:.3g} per token (at most "
                    f"{probe.tolerance:g} is let pass); does it serve the model of actor.model.path?"
                )

    def sleep(self) -> None:
        self._servers.map(lambda s: s.sleep())

    def wake(self) -> None:
        self._servers.map(lambda s: s.wake())

    def close(self) -> None:
        """Removes the files of weight syncs. The servers stay: they were not started here."""
        self.handover.close()


class FleetSampler(Sampler):
    """Completions from a fleet, by its newest weights or by those that were the newest at `hold`.

    On the main process alone, in any thread.
    """

    def __init__(self, fleet: Fleet, servers: ServerGroup[Server]) -> None:
        self._fleet, self.servers = fleet, servers
        self.held: str | None = None
        self._todo: Collection[Any] = ()

    def hold(self) -> None:
        """Samples by the fleet's newest weights, also when it has newer ones, until `release`."""
        self.held = self._fleet.version

    def release(self) -> None:
        self.held = None

    @property
    def waiting(self) -> int:
        """Requests that no server has yet."""
        return len(self._todo)

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Returns completions in the order of the requests. Raises as `ServerSampler.sample`."""
        fleet, version = self._fleet, self.held or self._fleet.version
        for sampling in {request.sampling for request in requests}:
            for server in self.servers:
                server.refuse(sampling)
        self._check_weights(version)
        todo = self._todo = collections.deque(enumerate(requests))
        completions: dict[int, Completion] = {}
        adapter = version if fleet.takes_adapters else None

        def work(server: Server) -> None:
            while True:
                with fleet.slots[server.http.url]:
                    try:
                        index, request = todo.popleft()
                    except IndexError:
                        return
                    completions[index] = server.sample(request, adapter=adapter)

        lines = min(fleet.concurrency, math.ceil(len(requests) / len(self.servers)))
        self.servers.call_all([functools.partial(work, server) for _ in range(lines) for server in self.servers])
        self._check_weights(version)
        return [completions[index] for index in range(len(requests))]

    def _check_weights(self, version: str | None) -> None:
        """Raises ServerError if a server has not the weights `version`, or with adapters has lost them."""
        for server, name in zip(self.servers, self.servers.map(lambda s: s.version()), strict=True):
            if name == version:
                continue
            if not self._fleet.takes_adapters or version not in server.adapter_names():
                raise server.http.error(
                    f"has the weights {name!r} and not {version!r} of this run: it was started again, or "
                    "another run uses it; run the same command again, with servers of its own"
                )


class ServerSampler(Sampler):
    """Completions from a `Fleet` of the kind `server`, on every rank.

    Collective as any sampler; constructing it is too. Arguments and errors are those of `Fleet`.
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
        ahead: int = 0,
    ) -> None:
        self._config, self._probe, self._adapted = config, probe, adapted
        self._is_main, self._on_main = is_main, on_main
        self._fleet: Fleet | None = None
        self._asleep = self._updated = False

        def start() -> None:
            self._fleet = Fleet(
                self.server, config, weights_dir=weights_dir, max_length=max_length, device=device, adapted=adapted,
                ahead=ahead,
            )  # fmt: skip

        on_main(start)

    @property
    def fleet(self) -> Fleet:
        """The servers; on the main process alone."""
        assert self._fleet is not None, "another process than the main one does not talk to servers"
        return self._fleet

    @property
    def handover(self) -> str | None:
        """The name of the weight sync, also of one that `auto` chose; None on other processes than the main one."""
        return None if self._fleet is None else self._fleet.handover.name

    @property
    def notes(self) -> Sequence[str]:
        if self._fleet is None:
            return ()
        handover = self._fleet.handover
        why = f" ({handover.why})" if handover.why else ""
        return (f"rollout.server.handover: {handover.name}{why}",)

    @property
    def takes_adapters(self) -> bool:
        return self._adapted is not None

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Returns completions. Raises ServerError, or ConfigError for parameters whose log-probs a server does not
        give."""
        assert self._updated, "update_weights comes before sample"
        self.wake()
        return self._on_main(lambda: self.fleet.sample(requests))

    def log_probs(self, tokens: Sequence[int]) -> list[list[float]]:
        """Returns log-probs of `tokens[1:]` at temperature 1, from each server. Collective."""
        return self._on_main(lambda: self.fleet.log_probs(tokens))

    def update_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Gives all servers the new weights.

        After an error (ServerError) those that can be reached have the old ones, or stay paused.
        """
        self.wake()
        error: UserError | None = None
        if self._is_main:
            try:
                self.fleet.send(weights)
            except UserError as caught:
                error = caught
        else:
            for _ in weights:
                pass
        self._on_main(lambda: _raise(error))
        self._updated = True
        probe = self._probe
        if probe is not None:
            expected = list(probe.log_probs(probe.tokens))
            self._on_main(lambda: self.fleet.check_probe(probe, expected))

    def sleep(self) -> None:
        if self._config.sleep and not self._asleep:
            self._on_main(lambda: self.fleet.sleep())
            self._asleep = True

    def wake(self) -> None:
        if self._asleep:
            self._on_main(lambda: self.fleet.wake())
            self._asleep = False

    def close(self) -> None:
        """Ends the fleet, as `Fleet.close`."""
        if self._fleet is not None:
            self._fleet.close()


def _raise(error: UserError | None) -> None:
    if error is not None:
        raise error
