"""Weight sync to inference servers: all get the actor's new weights, or none samples.

- **disk**: the weights are written whole to a folder that the servers see. Then every server is paused: its requests
  end or are refused. Every server loads the folder. When all have done so, they resume. If one cannot, all load the
  folder before it again; if a server cannot even do that, it stays paused.
- **broadcast**, **ipc** (links.py): every server is paused first. Then buckets of weights go straight into the servers'
  processes; while one is sent and loaded, the next is gathered. There are no old weights to go back to. If one server
  fails, all stay paused under the name `INCOMPLETE`, until a run syncs whole weights again.

No token is sampled from weights that are partly new, either way. On the main process alone.
"""

from __future__ import annotations

import abc
import concurrent.futures
import functools
import pathlib
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

import torch
from torch import Tensor

from mrl.config.ppo import ServerConfig
from mrl.engine import links
from mrl.engine.links import Link
from mrl.errors import ConfigError, ServerError, first_line
from mrl.rollout.http import HttpClient, RequestAborted
from mrl.rollout.weights import DrainedStream, Shapes, WeightFolders

T = TypeVar("T")
KEY = "rollout.server.handover"
INCOMPLETE = "incomplete"
"""What a server calls its weights while new ones are on their way through a link."""

LAST_WORDS_S = 5.0
"""Longest wait for what a server says of a failure, once another one has failed."""


class Receiver(abc.ABC):
    """An inference server as a receiver of new weights; methods raise ServerError.

    `path`: where its own weights came from. Methods from `workers` to `leave` are for the links in `links` alone.
    """

    path: str
    links: frozenset[str] = frozenset()  # of links.LINKS; known after `inspect`
    greets = False  # its processes at a link are mrl's own, which say when they have met
    how_to_link = "its kind of server has none"  # what a server has to be started with, for links

    def __init__(self, http: HttpClient) -> None:
        self.http = http

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

    def memory_obstacle(self, device: torch.device, *, named: bool) -> str | None:
        """Returns why its processes do not see memory of `device`, for `ipc` alone; None if they do.

        named: `ipc` is asked for by its name. That decides for a server that does not say.
        """
        raise NotImplementedError

    def memory_link(self, device: torch.device, servers: ServerGroup[Any]) -> Link:
        """Returns the link `ipc` for servers of this kind."""
        return links.SharedMemoryLink(device, len(servers))

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


R = TypeVar("R", bound=Receiver)


class ServerGroup(Sequence[R], Generic[R]):
    """Call several servers at the same time."""

    def __init__(self, servers: Sequence[R]) -> None:
        self._servers = tuple(servers)

    @overload
    def __getitem__(self, index: int) -> R: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[R]: ...
    def __getitem__(self, index: int | slice) -> R | Sequence[R]:
        return self._servers[index]

    def __len__(self) -> int:
        return len(self._servers)

    def map(self, call: Callable[[R], T]) -> list[T]:
        """Makes `call` for each server at the same time. Returns the results when all have ended, or raises the first
        error."""
        return [future.result() for future in self._ended(call)]

    def outcomes(self, call: Callable[[R], T]) -> list[T | ServerError]:
        """Calls like `map`, with a ServerError as the result of its server."""
        outcomes: list[T | ServerError] = []
        for future in self._ended(call):
            try:
                outcomes.append(future.result())
            except ServerError as error:
                outcomes.append(error)
        return outcomes

    def _ended(self, call: Callable[[R], T]) -> list[concurrent.futures.Future[T]]:
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

    def call_within(self, seconds: float, call: Callable[[R], None]) -> None:
        """Makes `call` for each server, and ends those that take longer. Errors are ignored."""
        with concurrent.futures.ThreadPoolExecutor(len(self)) as pool:
            futures = [pool.submit(call, server) for server in self]
            concurrent.futures.wait(futures, seconds)
            self.abort_requests()
        self.allow_requests()

    def call_while(self, call: Callable[[R], None], act: Callable[[Callable[[], bool]], None]) -> None:
        """Makes `call` for each server while `act` runs; returns when all have ended. Raises the first error.

        act: is given a function that says whether a server has failed. It then ends without waiting for the server. If
        `act` raises LinkBroken, a server most likely knows the reason, so its words are awaited for a while. Then
        requests that are under way are ended.
        """
        broken: links.LinkBroken | None = None
        with concurrent.futures.ThreadPoolExecutor(len(self)) as pool:
            futures = [pool.submit(call, server) for server in self]

            def failed() -> bool:
                return any(future.done() and future.exception() is not None for future in futures)

            try:
                act(failed)
            except links.LinkBroken as error:
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


class WeightSync(abc.ABC):
    """Send weights to all of `servers`."""

    name: str
    why = ""  # it is none that is faster

    @abc.abstractmethod
    def send(self, weights: Iterator[tuple[str, Tensor]]) -> str:
        """Gives all servers the weights, and returns the name by which they call them.

        Reads `weights` to its end whatever happens, because other ranks take part in it. Raises ServerError; then those
        that can be reached have the old weights, or stay paused.
        """

    @abc.abstractmethod
    def close(self) -> None: ...


def make_weight_sync(
    servers: ServerGroup[Any], config: ServerConfig, weights_dir: str, device: torch.device
) -> WeightSync:
    """Returns the way of `config.handover` to inspected servers. device: the one that the actor is on.

    `auto` takes the way that all servers have, on a GPU. Raises ConfigError if a server does not have the configured
    one.
    """
    folders = WeightFolders(weights_dir, bucket_mb=config.bucket_mb)
    chosen, why = _choose(servers, config.handover, device, sleeps=config.sleep)
    if chosen == "disk":
        return DiskWeightSync(servers, folders, why)
    return LinkWeightSync(servers, chosen, device, bucket_mb=config.bucket_mb, timeout_s=config.timeout_s)


def _choose(servers: ServerGroup[Any], asked: str, device: torch.device, *, sleeps: bool) -> tuple[str, str]:
    """Returns the way, and why it is none that is faster ("" if there is none)."""
    if asked == "disk":
        return "disk", "as configured"
    if asked == "auto" and device.type != "cuda":
        return "disk", "as the actor is on a CPU"
    faster = []
    for way in ("ipc", "broadcast") if asked == "auto" else (asked,):
        found = servers.map(functools.partial(_obstacle, way=way, device=device, sleeps=sleeps, named=asked == way))
        obstacles = [(server, obstacle) for server, obstacle in zip(servers, found, strict=True) if obstacle]
        if not obstacles:
            return way, ""
        if asked != "auto":
            server, (why, fix) = obstacles[0]
            raise ConfigError(KEY, asked, f"cannot reach {server.http.url}: {why}", fix)
        server, (why, fix) = obstacles[0]
        faster.append(f"not {way}, as of {server.http.url}: {why}")
    if fix.startswith("start it"):
        faster.append(fix.removesuffix(", or set it to disk"))
    return "disk", "; ".join(faster)


def _obstacle(server: Receiver, way: str, device: torch.device, *, sleeps: bool, named: bool) -> tuple[str, str] | None:
    """Returns why weights cannot take `way` to a server, and what would help; None if they can.

    named: the way is asked for by its name.
    """
    if way not in server.links:
        return "it takes no weights that way", f"start it with {server.how_to_link}, or set it to disk"
    if way == "broadcast":
        # Servers do not say which GPU they are on. One that sleeps is on the trainer's: that is what sleep is for.
        if sleeps and device.type == "cuda":
            why = "rollout.server.sleep is for a server on the trainer's GPU, and NCCL refuses two processes on one"
            return why, "set it to auto, ipc or disk, or rollout.server.sleep to false if it has GPUs of its own"
        return None
    why_not = server.memory_obstacle(device, named=named)
    return None if why_not is None else (why_not, f"set it to {'disk' if sleeps else 'broadcast'}")


def pause(servers: ServerGroup[Any]) -> None:
    """Pauses all servers. If one cannot, all resume, and ServerError says why."""
    try:
        servers.map(lambda s: s.pause())
    except ServerError:
        servers.outcomes(lambda s: s.resume())
        raise


# ---------------------------------------------------------------------------------------------------------------- disk


class DiskWeightSync(WeightSync):
    name = "disk"

    def __init__(self, servers: ServerGroup[Any], folders: WeightFolders, why: str = "") -> None:
        self._servers, self._folders, self.why = servers, folders, why
        self._shapes: Shapes = {}
        self._version: str | None = None
        self._loaded = {server: (server.path, "as it was started") for server in servers}

    def send(self, weights: Iterator[tuple[str, Tensor]]) -> str:
        folder, shapes = self._folders.write(weights)
        assert shapes and self._shapes in ({}, shapes), "weights have other names or shapes than before"
        self._shapes = shapes
        new = (str(folder), folder.name)
        try:
            self._servers.map(lambda s: s.check_names(shapes))
            self._servers.map(lambda s: s.pause())
        except ServerError as failed:
            self._servers.outcomes(lambda s: s.resume())
            self._keep_loaded()
            raise failed
        try:
            self._servers.map(lambda s: s.load(*new))
        except ServerError as failed:
            raise self._roll_back(failed) from failed
        self._servers.map(lambda s: s.resume())
        self._loaded = dict.fromkeys(self._servers, new)
        self._version = folder.name
        self._folders.keep_only(folder)
        return folder.name

    def _roll_back(self, failed: ServerError) -> ServerError:
        """Loads the old weights everywhere. Returns the error to raise."""

        def back(server: Receiver) -> None:
            server.load(*self._loaded[server])
            server.resume()

        results = zip(self._servers, self._servers.outcomes(back), strict=True)
        stuck = [server.http.url for server, result in results if isinstance(result, ServerError)]
        self._keep_loaded()
        after = f"; {', '.join(stuck)} cannot go back, take(s) no requests, and must be started again" if stuck else ""
        return ServerError(
            f"{failed}; no server samples from the new weights{after}; rollout.server.weights_dir must be one folder "
            "for all"
        )

    def _keep_loaded(self) -> None:
        """Removes all folders but the one that servers may have to load again."""
        self._folders.keep_only(None if self._version is None else pathlib.Path(self._folders.root) / self._version)

    def close(self) -> None:
        self._folders.keep_only(None)


# --------------------------------------------------------------------------------------------------------------- links


class LinkWeightSync(WeightSync):
    """Send weights through a link. name: of links.LINKS."""

    def __init__(
        self, servers: ServerGroup[Any], name: str, device: torch.device, *, bucket_mb: int, timeout_s: float
    ) -> None:
        self._servers, self.name, self._device = servers, name, device
        self._bucket_bytes, self._timeout_s = bucket_mb * 2**20, timeout_s
        self._link: links.Link | None = None
        self._shapes: Shapes = {}
        self._count = 0

    def send(self, weights: Iterator[tuple[str, Tensor]]) -> str:
        self._count += 1
        version = f"{self._count:08d}-{secrets.token_hex(4)}"
        stream = DrainedStream(weights)
        try:
            link = self._joined()
            pause(self._servers)
            try:
                self._servers.map(lambda s: s.begin())
                self._send_all(stream, link)
                link.rest()
                self._servers.map(lambda s: s.finish(version))
                link.rest()
            except ServerError as failed:
                raise self._given_up(failed) from failed
            self._servers.map(lambda s: s.resume())
        finally:
            if not stream.broken:  # else the other ranks are not at its end, and never will be
                stream.read_the_rest()
        return version

    def _joined(self) -> links.Link:
        """Returns the link, which all servers have joined: at the first weight sync, or the first after an error."""
        if self._link is not None:
            return self._link
        if self.name == "ipc":
            self._link = self._servers[0].memory_link(self._device, self._servers)
        else:
            hosts = {server.http.own_address() for server in self._servers}
            # Servers beside the trainer reach it under the address that others see, but not the other way round.
            host = min(hosts, key=lambda address: address.startswith("127.") or address == "::1")
            workers = self._servers.map(lambda s: s.workers())
            greets = all(server.greets for server in self._servers)
            try:
                self._link = links.BroadcastLink(self._device, host, workers, timeout_s=self._timeout_s, greets=greets)
            except (OSError, RuntimeError) as error:
                raise ServerError(f"{KEY}: no link from {host}: {first_line(error)}") from error
        link = self._link
        offers = dict(zip(self._servers, link.offers(), strict=True))
        try:
            self._servers.call_while(lambda s: s.join(offers[s]), link.connect)
        except ServerError:
            self._drop_link()
            raise
        return link

    def _send_all(self, weights: Iterator[tuple[str, Tensor]], link: links.Link) -> None:
        """Sends one bucket while the next is gathered and written."""
        shapes: Shapes = {}
        with concurrent.futures.ThreadPoolExecutor(1, "handover") as pool:
            sent: concurrent.futures.Future[None] | None = None
            for bucket in links.buckets(weights, self._bucket_bytes, functools.partial(self._room, link)):
                if self._device.type == "cuda":
                    # The copies into the bucket are on this thread's stream. Other processes are about to be told to
                    # read it, and the thread that sends it has the default stream, which may be another.
                    torch.cuda.current_stream(self._device).synchronize()
                if sent is not None:
                    sent.result()
                sent = pool.submit(self._send_one, bucket, link)
                shapes |= dict(zip(bucket.names, map(tuple, bucket.shapes), strict=True))
            if sent is not None:
                sent.result()
        assert shapes and self._shapes in ({}, shapes), "weights have other names or shapes than before"
        self._shapes = shapes

    def _room(self, link: links.Link, turn: int, size: int) -> Tensor:
        """Returns `Link.buffer`. Raises ServerError if there is no memory for it."""
        on_gpu = self._device.type == "cuda"
        no_memory = torch.OutOfMemoryError if on_gpu else RuntimeError  # a CPU's has no type of its own
        try:
            return link.buffer(turn, size)
        except (OSError, no_memory) as error:
            where = "the GPU" if on_gpu else "/dev/shm" if self.name == "ipc" else "memory"
            raise ServerError(
                f"{KEY}: {where} has no room for a bucket of {size / 2**20:.4g} MB, of which there are two "
                f"({first_line(error)}); set rollout.server.bucket_mb lower, or {KEY} to disk"
            ) from error

    def _send_one(self, bucket: links.Bucket, link: links.Link) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # of this thread
        descriptions = dict(zip(self._servers, link.describe(bucket), strict=True))
        self._servers.call_while(lambda s: s.receive(descriptions[s]), lambda failed: link.send(bucket, failed))

    def _given_up(self, failed: ServerError) -> ServerError:
        """Takes the link down, so that no server waits for more. Returns the error to raise."""
        self._drop_link()
        return ServerError(
            f"{failed}; no server samples: their weights are partly new. They stay paused until the same command, run "
            "again, hands over whole ones"
        )

    def _drop_link(self) -> None:
        """Lets the servers leave before the trainer: its own waits end with their connections."""
        link, self._link = self._link, None
        if link is not None:
            link.leave()
        self._servers.call_within(LAST_WORDS_S, lambda s: s.leave())
        if link is not None:
            link.close()

    def close(self) -> None:
        if self._link is not None:
            self._drop_link()
