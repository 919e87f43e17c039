"""Weight sync to inference servers: all get the actor's new weights, or none samples.

- **disk**: the weights are written whole to a folder that the servers see. Then every server is paused: its requests
  end or are refused. Every server loads the folder. When all have done so, they resume. If one cannot, all load the
  folder before it again; if a server cannot even do that, it stays paused.
- **broadcast**, **ipc** (links.py): every server is paused first. Then buckets of weights go straight into the servers'
  processes; while one is sent and loaded, the next is gathered. There are no old weights to go back to. If one server
  fails, all stay paused under the name `INCOMPLETE`, until a run syncs whole weights again.

No token is sampled from weights that are partly new, either way. On the main process alone.

`WeightFolders` has a folder of safetensors files for each weight sync. It gets a new name, so no server reads cached
files of another one. Folders are kept for as long as a server may have to go back to them.
"""

from __future__ import annotations

import abc
import concurrent.futures
import functools
import hashlib
import json
import os
import pathlib
import re
import secrets
import shutil
from collections.abc import Iterator

import safetensors.torch
import torch
from torch import Tensor

from mrl.config.ppo import ServerConfig
from mrl.engine import links
from mrl.errors import ConfigError, ServerError, first_line
from mrl.rollout.server import KEY, LAST_WORDS_S, Server, ServerGroup
from mrl.weights.safetensors_io import INDEX


class WeightSync(abc.ABC):
    """Sends weights to all of `servers`."""

    name: str
    why = ""  # it is none that is faster
    servers: ServerGroup

    @abc.abstractmethod
    def send(self, weights: Iterator[tuple[str, Tensor]]) -> str:
        """Gives all servers the weights, and returns the name by which they call them.

        Reads `weights` to its end whatever happens, because other ranks take part in it. Raises ServerError; then those
        that can be reached have the old weights, or stay paused.
        """

    def admit(self, server: Server) -> None:  # noqa: B027 (some have nothing to do)
        """Prepares an inspected server that was started again. Raises UserError if it cannot take weights this way."""

    def use(self, servers: ServerGroup) -> None:
        """Sends to these from now on: admitted ones, and those that it sent to before."""
        self.servers = servers

    @abc.abstractmethod
    def close(self) -> None: ...


def make_weight_sync(servers: ServerGroup, config: ServerConfig, weights_dir: str, device: torch.device) -> WeightSync:
    """Returns the way of `config.handover` to inspected servers. device: the one that the actor is on.

    `auto` takes the way that all servers have, on a GPU. Raises ConfigError if a server does not have the configured
    one.
    """
    folders = WeightFolders(weights_dir, bucket_mb=config.bucket_mb)
    chosen, why = _choose(servers, config.handover, device, sleeps=config.sleep)
    if chosen == "disk":
        return DiskWeightSync(servers, folders, why)
    return LinkWeightSync(servers, chosen, device, bucket_mb=config.bucket_mb, timeout_s=config.timeout_s)


def _choose(servers: ServerGroup, asked: str, device: torch.device, *, sleeps: bool) -> tuple[str, str]:
    """Returns the way, and why it is none that is faster ("" if there is none)."""
    if asked == "disk":
        return "disk", "as configured"
    if asked == "auto" and device.type != "cuda":
        return "disk", "as the actor is on a CPU"
    faster = []
    for way in ("ipc", "broadcast") if asked == "auto" else (asked,):
        found = servers.map(functools.partial(_obstacle, way=way, device=device, sleeps=sleeps, named=asked == way))
        obstacles = [f"{server.http.url}: {why}" for server, why in zip(servers, found, strict=True) if why]
        if not obstacles:
            return way, ""
        if asked != "auto":
            raise ConfigError(KEY, asked, f"cannot reach {obstacles[0]}", "set it to auto or disk")
        faster.append(f"not {way}, as of {obstacles[0]}")
    return "disk", "; ".join(faster)


def _obstacle(server: Server, way: str, device: torch.device, *, sleeps: bool, named: bool) -> str | None:
    """Returns why weights cannot take `way` to a server; None if they can.

    named: the way is asked for by its name.
    """
    if way not in server.links:
        return f"it takes no weights that way unless you start it with {server.how_to_link}"
    if way == "broadcast":
        # Servers do not say which GPU they are on. One that sleeps is on the trainer's: sleep is for that.
        if sleeps and device.type == "cuda":
            return "rollout.server.sleep is for a server on the trainer's GPU, and NCCL refuses two processes on one"
        return None
    return server.memory_obstacle(device, named=named)


def pause(servers: ServerGroup) -> None:
    """Pauses all servers. If one cannot, all resume, and ServerError says why."""
    try:
        servers.map(lambda s: s.pause())
    except ServerError:
        servers.outcomes(lambda s: s.resume())
        raise


# ---------------------------------------------------------------------------------------------------------------- disk


class DiskWeightSync(WeightSync):
    name = "disk"

    def __init__(self, servers: ServerGroup, folders: WeightFolders, why: str = "") -> None:
        self.servers, self._folders, self.why = servers, folders, why
        self._shapes: Shapes = {}
        self._version: str | None = None
        self._loaded: dict[Server, tuple[str, str]] = {}  # folder and name of each server's weights
        for server in servers:
            self.admit(server)

    def admit(self, server: Server) -> None:
        self._loaded[server] = (server.path, "as it was started")

    def send(self, weights: Iterator[tuple[str, Tensor]]) -> str:
        folder, shapes = self._folders.write(weights)
        assert shapes and self._shapes in ({}, shapes), "weights have other names or shapes than before"
        self._shapes = shapes
        new = (str(folder), folder.name)
        try:
            self.servers.map(lambda s: s.check_names(shapes))
            self.servers.map(lambda s: s.pause())
        except ServerError as failed:
            self.servers.outcomes(lambda s: s.resume())
            self._keep_loaded()
            raise failed
        try:
            self.servers.map(lambda s: s.load(*new))
        except ServerError as failed:
            raise self._roll_back(failed) from failed
        self.servers.map(lambda s: s.resume())
        self._loaded = dict.fromkeys(self.servers, new)
        self._version = folder.name
        self._folders.keep_only(folder)
        return folder.name

    def _roll_back(self, failed: ServerError) -> ServerError:
        """Loads the old weights everywhere. Returns the error to raise."""

        def back(server: Server) -> None:
            server.load(*self._loaded[server])
            server.resume()

        results = zip(self.servers, self.servers.outcomes(back), strict=True)
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
    """Sends weights through a link. name: of links.LINKS."""

    def __init__(
        self, servers: ServerGroup, name: str, device: torch.device, *, bucket_mb: int, timeout_s: float
    ) -> None:
        self.servers, self.name, self._device = servers, name, device
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
            pause(self.servers)
            try:
                self.servers.map(lambda s: s.begin())
                self._send_all(stream, link)
                link.rest()
                self.servers.map(lambda s: s.finish(version))
                link.rest()
            except ServerError as failed:
                raise self._given_up(failed) from failed
            self.servers.map(lambda s: s.resume())
        finally:
            if not stream.broken:  # else the other ranks are not at its end, and never will be
                stream.read_the_rest()
        return version

    def _joined(self) -> links.Link:
        """Returns the link, which all servers have joined: at the first weight sync, or the first after an error."""
        if self._link is not None:
            return self._link
        if self.name == "ipc":
            self._link = self.servers[0].memory_link(self._device, self.servers)
        else:
            hosts = {server.http.own_address() for server in self.servers}
            # Servers on the trainer's machine reach it under its outside address too, others not under a loopback one.
            host = min(hosts, key=lambda address: address.startswith("127.") or address == "::1")
            workers = self.servers.map(lambda s: s.workers())
            greets = all(server.greets for server in self.servers)
            try:
                self._link = links.BroadcastLink(self._device, host, workers, timeout_s=self._timeout_s, greets=greets)
            except (OSError, RuntimeError) as error:
                raise ServerError(f"{KEY}: no link from {host}: {first_line(error)}") from error
        link = self._link
        offers = dict(zip(self.servers, link.offers(), strict=True))
        try:
            self.servers.call_while(lambda s: s.join(offers[s]), link.connect)
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
        try:
            return link.buffer(turn, size)
        except (OSError, RuntimeError) as error:
            raise ServerError(
                f"{KEY}: there is no room for a bucket of {size / 2**20:.4g} MB, of which there are two "
                f"({first_line(error)}); set rollout.server.bucket_mb lower, or {KEY} to disk"
            ) from error

    def _send_one(self, bucket: links.Bucket, link: links.Link) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # for this thread
        descriptions = dict(zip(self.servers, link.describe(bucket), strict=True))
        self.servers.call_while(lambda s: s.receive(descriptions[s]), lambda failed: link.send(bucket, failed))

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
        self.servers.call_within(LAST_WORDS_S, lambda s: s.leave())
        if link is not None:
            link.close()

    def admit(self, server: Server) -> None:
        if self.name not in server.links:
            raise server.http.error(f"takes no weights by {self.name}; start it with {server.how_to_link}")

    def use(self, servers: ServerGroup) -> None:
        self.close()  # the next weight sync makes a link with these
        super().use(servers)

    def close(self) -> None:
        if self._link is not None:
            self._drop_link()


_FOLDER = re.compile(r"\d{8}-[0-9a-f]{8}")

Shapes = dict[str, tuple[int, ...]]


def weights_dir(config: ServerConfig, output_dir: str) -> str:
    """Returns the folder of a run's weights alone: below `weights_dir` if it is set, else in `output_dir`."""
    output_dir = os.path.abspath(output_dir)
    if config.weights_dir is None:
        return os.path.join(output_dir, "rollout_weights")
    run = hashlib.sha256(output_dir.encode()).hexdigest()[:12]
    return os.path.join(os.path.abspath(os.path.expanduser(config.weights_dir)), run)


class WeightFolders:
    """Folders below `root`, which belongs to one run: what an earlier start left there is removed.

    On one process only.
    """

    def __init__(self, root: str, *, bucket_mb: int) -> None:
        self.root = pathlib.Path(root).absolute()
        self._bucket_bytes = bucket_mb * 2**20
        self._count = 0
        self.keep_only(None)

    def write(self, weights: Iterator[tuple[str, Tensor]]) -> tuple[pathlib.Path, Shapes]:
        """Returns a new folder with all of `weights`, and their shapes.

        Holds one bucket of them in memory (or one tensor, if it is larger). If the folder cannot be written, `weights`
        is still read to its end, because other ranks are in it too. Then ServerError says why.
        """
        folder, stream = self.new(), DrainedStream(weights)
        writer = _Writer(folder, self._bucket_bytes)
        try:
            for name, tensor in stream:
                writer.add(name, tensor)
            writer.close()
        except OSError as why:
            if stream.broken:  # the other ranks are not at its end, and never will be
                raise
            stream.read_the_rest()
            shutil.rmtree(folder, ignore_errors=True)
            raise self.unwritable(why) from why
        return folder, writer.shapes

    def new(self) -> pathlib.Path:
        """Returns a folder that is not there yet, with a new name."""
        self._count += 1
        return self.root / f"{self._count:08d}-{secrets.token_hex(4)}"

    def unwritable(self, why: OSError) -> ServerError:
        return ServerError(
            f"rollout.server.weights_dir: {self.root} cannot be written ({why}); it needs room for two copies of "
            "the weights"
        )

    def keep_only(self, *folders: pathlib.Path | None) -> None:
        """Removes all other folders."""
        if self.root.is_dir():
            for other in self.root.iterdir():
                if _FOLDER.fullmatch(other.name) and other not in folders:
                    shutil.rmtree(other)


class _Writer:
    """Safetensors files of a bucket each, and their index."""

    def __init__(self, folder: pathlib.Path, bucket_bytes: int) -> None:
        self.folder, self._limit = folder, bucket_bytes
        self.shapes: Shapes = {}
        self._bucket: dict[str, Tensor] = {}
        self._size = 0
        self._files: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        assert name not in self.shapes, f"{name} came twice"
        size = tensor.numel() * tensor.element_size()
        if self._bucket and self._size + size > self._limit:
            self._flush()
        # A copy: the stream may use its buffer again, and safetensors refuses tensors that share memory.
        self._bucket[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        self._size += size
        self.shapes[name] = tuple(tensor.shape)

    def _flush(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        file = f"model-{len(set(self._files.values())) + 1:05d}.safetensors"
        try:
            safetensors.torch.save_file(self._bucket, self.folder / file, metadata={"format": "pt"})
        except safetensors.SafetensorError as error:  # a full disk, as it says it
            raise OSError(str(error)) from error
        self._files |= dict.fromkeys(self._bucket, file)
        self._bucket, self._size = {}, 0

    def close(self) -> None:
        self._flush()
        index = {"metadata": {}, "weight_map": self._files}
        (self.folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")


class DrainedStream:
    """A stream of weights that is read to its end whatever happens to its reader: other ranks take part in it.

    broken: it failed itself.
    """

    def __init__(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self._weights, self.broken = weights, False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self

    def __next__(self) -> tuple[str, Tensor]:
        try:
            return next(self._weights)
        except StopIteration:
            raise
        except BaseException:
            self.broken = True
            raise

    def read_the_rest(self) -> None:
        for _ in self:
            pass
