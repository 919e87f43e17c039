"""Inference servers that share requests, on the main process: which are there, and completions from them.

handover.py syncs weights. Each set of weights has a name. `FleetSampler.sample` asks each server for it before and
after. Completions of a server with another name do not count: it was started again meanwhile.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from mrl.config.ppo import ServerConfig
from mrl.engine.base import Completion
from mrl.errors import ConfigError, ServerError, UserError
from mrl.rollout.adapters import PROBE_IDS, AdapterTraining, AdapterWeightSync
from mrl.rollout.base import Sampler, SampleRequest
from mrl.rollout.handover import WeightSync, make_weight_sync
from mrl.rollout.http import HttpClient, RequestAborted
from mrl.rollout.server import Server, ServerGroup

ASYNC_KEY = "rollout.async_level"

AWAY_S = 10.0  # longest wait for an answer of a server that was left out


@dataclasses.dataclass(frozen=True)
class Probe:
    """A text that the servers are asked about after every weight sync."""

    tokens: Sequence[int]  # ids of the text
    log_probs: Callable[[Sequence[int]], Sequence[float]]
    """Gives the log-probs of `tokens[1:]` at temperature 1 by the trainer's own weights; called on every rank."""
    tolerance: float = 0.1  # largest mean difference: servers round otherwise, most of all in bfloat16


class Fleet:
    """The servers of `config.urls`, which share requests. On the main process alone.

    A server that is lost, or was started again, is left out while others are there. The others sample its requests,
    with the same seeds. `find_servers` takes it in again before a weight sync.

    - server: the kind of server
    - weights_dir: a folder of this run alone (`mrl.rollout.handover.weights_dir`)
    - max_length: tokens of the longest sequence
    - vocab_size: of the actor's model
    - device: the actor's
    - adapted: the actor, if `send` gets adapters alone and servers hold the base; None if it gets all weights
    - ahead: the rollouts that are sampled while others train. `samplers` has one for each, behind one of the newest
      weights
    - say: shows a line to the user, in any thread

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
        say: Callable[[str], None] = lambda line: None,
        vocab_size: int | None = None,
    ) -> None:
        self._config, self.concurrency, self.takes_adapters = config, config.concurrency, adapted is not None
        self._max_length, self._ahead, self._say = max_length, ahead, say
        self.version: str | None = None  # the servers' name for the newest weights
        self._servers = ServerGroup([server(HttpClient(url, timeout_s=config.timeout_s)) for url in config.urls])
        self.slots = {each.http.url: threading.BoundedSemaphore(config.concurrency) for each in self._servers}
        self.probe_gap = 0.0  # of the last probe, the largest mean difference of a server
        self.away: dict[str, ServerError] = {}  # why servers are left out
        self.changes = collections.Counter[str]()  # by url, how often a server was left out or taken in
        self._lock = threading.Lock()
        for each in self._servers:
            each.vocab_size = vocab_size
        self._servers.map(self._inspect)
        self.handover: WeightSync
        if adapted is None:
            self.handover = make_weight_sync(self._servers, config, weights_dir, device)
        else:
            text = PROBE_IDS if max_length is None else PROBE_IDS[: max_length - 1]
            in_use = self._held if ahead else None
            self._servers.map(self._check_room)
            self.handover = AdapterWeightSync(self._servers, weights_dir, adapted, text, in_use)
        # Their clients are their own: a sampler that finds a server lost ends the requests of all samplers to it.
        self.samplers = [
            FleetSampler(self, ServerGroup([self._connect(each) for each in self._servers])) for _ in range(1 + ahead)
        ]

    def _inspect(self, server: Server) -> None:
        http = server.http
        server.http = http.another(server.start_s)
        try:
            longest = server.inspect(sleeps=self._config.sleep)
        finally:
            server.http = http
        if self._max_length is not None and longest is not None and longest < self._max_length:
            why = (
                f"{server.http.url} takes {longest} tokens and the longest sequence (data.max_prompt_length + "
                f"rollout.max_new_tokens) has {self._max_length}"
            )
            raise ConfigError("rollout.server.urls", why=why, fix="start it for that many")

    def _check_room(self, server: Server) -> None:
        adapters = self._ahead
        if server.most_adapters is not None and server.most_adapters < adapters:
            why = (
                f"samples with {adapters} adapters at a time, and {server.http.url} takes {server.most_adapters}: "
                "it would hold requests back"
            )
            raise ConfigError(ASYNC_KEY, adapters, why, f"start it with --max-loras {adapters} or more")

    def _connect(self, server: Server) -> Server:
        """Returns a client of the same server whose requests end apart from those of others."""
        other = copy.copy(server)
        other.http = server.http.another()
        return other

    @property
    def present(self) -> ServerGroup:
        """The servers that are not left out."""
        return self.present_among(self._servers)

    def present_among(self, clients: ServerGroup) -> ServerGroup:
        """Returns the clients of servers that are not left out."""
        return ServerGroup(client for client in clients if client.http.url not in self.away)

    def _clients(self, url: str) -> Iterator[Server]:
        """Yields the samplers' clients of a server."""
        for sampler in self.samplers:
            yield from (server for server in sampler.servers if server.http.url == url)

    def leave_out(self, server: Server, why: ServerError, change: int | None = None) -> None:
        """Leaves a server out, and ends its requests. Raises the error if no other one is left.

        change: the number in `changes` when `why` was found out. With a later one nothing is done.
        """
        url = server.http.url
        with self._lock:
            if change is not None and self.changes[url] != change:
                return
            if all(other.http.url in {url, *self.away} for other in self._servers):
                before = [other for other in self.away if other != url]
                raise ServerError(f"{why}; left out before: {', '.join(before)}" if before else str(why))
            is_new = str(why) != str(self.away.get(url))
            self.away[url] = why
            self.changes[url] += 1
            for client in self._clients(url):
                client.http.abort_requests()
        if is_new:
            self._say(f"{why}; it is left out until it is there again")

    def find_servers(self) -> None:
        """Takes in servers that were started again, and leaves out those that are gone. Comes before a weight sync."""
        if self.version is None:  # they have no weights of this run
            return
        faults = self._servers.map(lambda s: self._why_not(s))
        admitted = False
        for server, why in zip(self._servers, faults, strict=True):
            is_away, is_lost = server.http.url in self.away, why is not None and why.lost
            if (is_away and is_lost) or (not is_away and why is None):  # as before
                continue
            try:
                if why is not None and is_lost:
                    raise why
                self._admit(server)
            except UserError as error:
                self.leave_out(server, error if isinstance(error, ServerError) else ServerError(str(error)))
                continue
            admitted = True
            with self._lock:
                self.away.pop(server.http.url, None)
                self.changes[server.http.url] += 1
                for client in self._clients(server.http.url):
                    client.http.allow_requests()
            self._say(f"rollout.server.urls: {server.http.url} is there again, and gets the newest weights")
        if admitted or self.present != self.handover.servers:
            self.handover.use(self.present)

    def _why_not(self, server: Server) -> ServerError | None:
        """Returns as `fault` does; of a server that is left out, and may hang, why it gives no log-probs soon."""
        if server.http.url not in self.away:
            return self.fault(server, self.version)
        asked = copy.copy(server)
        asked.http = server.http.another(AWAY_S)
        if not asked.http.is_reached():
            return asked.http.error("cannot be reached", lost=True)
        try:
            asked.inspect(sleeps=self._config.sleep)
            asked.score(PROBE_IDS if self._max_length is None else PROBE_IDS[: self._max_length - 1])
        except ServerError as error:
            return asked.http.error(f"is not there yet ({error})", lost=True)
        return None

    def _admit(self, server: Server) -> None:
        self._inspect(server)
        if self.takes_adapters:
            self._check_room(server)
        self.handover.admit(server)
        for client in self._clients(server.http.url):
            vars(client).update(vars(server) | {"http": client.http})

    def fault(self, server: Server, version: str | None) -> ServerError | None:
        """Returns why a server cannot sample by the weights `version`; None if it can."""
        try:
            name = server.version()
            if name == version or (self.takes_adapters and version in server.adapter_names()):
                return None
        except ServerError as error:
            return error
        return server.http.error(
            f"has the weights {name!r} and not {version!r} of this run: it was started again, or another run uses it; "
            "give each run servers of its own"
        )

    def _held(self) -> set[str]:
        """Returns the names of weights that are newest, or that a rollout is sampled with."""
        return {name for name in (self.version, *(sampler.held for sampler in self.samplers)) if name is not None}

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Returns completions by the newest weights, as `FleetSampler.sample`."""
        return self.samplers[0].sample(requests)

    def log_probs(self, tokens: Sequence[int]) -> list[list[float]]:
        """Returns log-probs of `tokens[1:]` at temperature 1 and the newest weights, from each server."""
        adapter = self.version if self.takes_adapters else None
        return self.present.map(lambda s: s.score(tokens, adapter=adapter))

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

    def check_probe(self, probe: Probe, expected: Sequence[float]) -> None:
        """Raises ServerError if a server's log-probs of the probe are not about the `expected` ones."""
        self.probe_gap = 0.0
        for server, found in zip(self.present, self.log_probs(probe.tokens), strict=True):
            gap = sum(abs(a - b) for a, b in zip(expected, found, strict=True)) / len(expected)
            self.probe_gap = max(self.probe_gap, gap)
            if not gap <= probe.tolerance:
                raise server.http.error(
                    f"gives log-probs that differ from the trainer's by {gap:.3g} per token (at most "
                    f"{probe.tolerance:g} is let pass); does it serve the model of actor.model.path?"
                )

    def sleep(self) -> None:
        present = self.present
        for server, outcome in zip(present, present.outcomes(lambda s: s.sleep()), strict=True):
            if isinstance(outcome, ServerError):
                self.leave_out(server, outcome)

    def wake(self) -> None:
        self.present.map(lambda s: s.wake())

    def close(self) -> None:
        """Removes the files of weight syncs. The servers stay: they were not started here."""
        self.handover.close()


class FleetSampler(Sampler):
    """Completions from a fleet, by its newest weights or by those that were the newest at `hold`.

    On the main process alone, in any thread.
    """

    def __init__(self, fleet: Fleet, servers: ServerGroup) -> None:
        self._fleet, self.servers = fleet, servers
        self.held: str | None = None

    def hold(self) -> None:
        """Samples by the fleet's newest weights, also when it has newer ones, until `release`."""
        self.held = self._fleet.version

    def release(self) -> None:
        self.held = None

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Returns completions in the order of the requests. Raises as `ServerSampler.sample`."""
        version = self.held or self._fleet.version
        for sampling in {request.sampling for request in requests}:
            for server in self.servers:
                server.refuse(sampling)
        completions: dict[int, tuple[Completion, Server]] = {}
        while True:
            servers = self._servers_with(version)
            # One that was started again meanwhile may have sampled by other weights.
            completions = {index: made for index, made in completions.items() if made[1] in servers}
            if len(completions) == len(requests):
                return [completions[index][0] for index in range(len(requests))]
            self._ask(servers, requests, completions, version)

    def _ask(
        self,
        servers: ServerGroup,
        requests: Sequence[SampleRequest],
        completions: dict[int, tuple[Completion, Server]],
        version: str | None,
    ) -> None:
        """Asks servers for the completions that are missing. Those of a lost server are done by others, or are left."""
        fleet = self._fleet
        todo = collections.deque(index for index in range(len(requests)) if index not in completions)
        adapter = version if fleet.takes_adapters else None

        def work(server: Server) -> None:
            url = server.http.url
            while True:
                with fleet.slots[url]:
                    change = fleet.changes[url]
                    if url in fleet.away:
                        return
                    try:
                        indices = [todo.popleft()]
                    except IndexError:
                        return
                    if server.takes_all:
                        indices += todo
                        todo.clear()
                    try:
                        made = server.sample_all([requests[index] for index in indices], adapter=adapter)
                        completions.update(zip(indices, ((each, server) for each in made), strict=True))
                    except (ServerError, RequestAborted) as error:
                        self._leave_out_by(error, server, version, change)
                        todo.extend(indices)

        lines = min(fleet.concurrency, math.ceil(len(todo) / len(servers)))
        servers.call_all([functools.partial(work, server) for _ in range(lines) for server in servers])

    def _leave_out_by(
        self, error: ServerError | RequestAborted, server: Server, version: str | None, change: int
    ) -> None:
        """Leaves a server out after an error; raises it where that is no fault of the server.

        One that was started again may refuse a request, as it has not the adapter that this names. If the server was
        left out or taken in since the request, the error says nothing.
        """
        fleet, url = self._fleet, server.http.url
        why: ServerError | None = None
        try:
            if isinstance(error, ServerError):
                why = error if error.lost else fleet.fault(server, version)
        except RequestAborted:
            pass
        if why is not None:
            fleet.leave_out(server, why, change)
        elif fleet.changes[url] == change:
            raise error

    def _servers_with(self, version: str | None) -> ServerGroup:
        """Returns the servers that have the weights, and leaves out the others. Raises ServerError if none is left."""
        fleet = self._fleet

        def check(server: Server) -> None:
            change = fleet.changes[server.http.url]
            try:
                why = fleet.fault(server, version)
            except RequestAborted:
                if fleet.changes[server.http.url] == change:
                    raise
                return
            if why is not None:
                fleet.leave_out(server, why, change)

        fleet.present_among(self.servers).map(check)
        return fleet.present_among(self.servers)
