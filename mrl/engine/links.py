"""Carries weights from the trainer into the processes of inference servers: both ends of the links.

- `broadcast`: the trainer's main process and all processes of the servers make a process group. It uses NCCL on GPUs
  and gloo on CPUs.
- `ipc`: the trainer writes into memory that the servers' processes on the same machine also map. It uses CUDA's IPC
  handles on GPUs and a file in /dev/shm on the host.

Weights come in buckets: the bytes of some tensors one after another. Their names, dtypes and shapes come as JSON beside
them. The other end is in the servers' environment (mrl.rollout.vllm_worker), so only torch is imported here.
"""

from __future__ import annotations

import abc
import base64
import contextlib
import dataclasses
import fcntl
import math
import os
import pathlib
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.engine.link_groups import (
    ASKED_S,
    CLEAN_UP,
    JOIN_S,
    LEFT,
    LET_BE,
    check,
    connect_all,
    delta,
    end_group,
    from_rank_0,
    make_group,
)

T = TypeVar("T")

Message = dict[str, Any]
"""JSON from one end to the other: an offer to join, or the layout of a bucket."""

PROTOCOL = 2
"""The version of the messages between both ends, because a server may run another mrl."""

_POLL_S = 0.0005
_SHM, _OWN = pathlib.Path("/dev/shm"), "mrl-link"  # files with another beginning belong to others


# ------------------------------------------------------------------------------------------------------------- buckets


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Holds some tensors, one after another in `data` (bytes)."""

    names: list[str]
    dtypes: list[str]  # torch's names, without "torch."
    shapes: list[list[int]]
    data: Tensor
    turn: int  # `data` is the beginning of this one of the two buffers

    @property
    def layout(self) -> Message:
        return {"names": self.names, "dtypes": self.dtypes, "shapes": self.shapes}


def buckets(
    weights: Iterable[tuple[str, Tensor]], limit: int, buffer: Callable[[int, int], Tensor]
) -> Iterator[Bucket]:
    """Yields `weights` in buckets of at most `limit` bytes; a larger tensor has a bucket of its own.

    buffer: returns buffer 0 or 1, with room for so many bytes. The buffers alternate, so that one is filled while the
    other is sent. So a bucket must have been sent when the next but one is requested.
    """
    names: list[str] = []
    dtypes: list[str] = []
    shapes: list[list[int]] = []
    data, size, turn = torch.empty(0), 0, 0
    for name, tensor in weights:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        # A tensor begins at a multiple of its element size, so that the other end can view it in place.
        if names and (size + flat.numel() > limit or size % tensor.element_size()):
            yield Bucket(names, dtypes, shapes, data[:size], turn)
            names, dtypes, shapes, size, turn = [], [], [], 0, 1 - turn
        if not names:
            data = buffer(turn, max(limit, flat.numel()))
        data[size : size + flat.numel()].copy_(flat)
        size += flat.numel()
        names.append(name)
        dtypes.append(str(tensor.dtype).removeprefix("torch."))
        shapes.append(list(tensor.shape))
        del tensor, flat  # frees their memory before the next
    if names:
        yield Bucket(names, dtypes, shapes, data[:size], turn)


def size_of(layout: Message) -> int:
    """Returns the bytes of a bucket's tensors together."""
    return sum(_bytes(dtype, shape) for dtype, shape in zip(layout["dtypes"], layout["shapes"], strict=True))


def unpack(layout: Message, data: Tensor) -> list[tuple[str, Tensor]]:
    """Returns the tensors of a bucket; they are views of `data`."""
    found, at = [], 0
    for name, dtype, shape in zip(layout["names"], layout["dtypes"], layout["shapes"], strict=True):
        size = _bytes(dtype, shape)
        found.append((name, data[at : at + size].view(getattr(torch, dtype)).view(shape)))
        at += size
    return found


def _bytes(dtype: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * getattr(torch, dtype).itemsize


# ---------------------------------------------------------------------------------------------------- the trainer's end


class LinkBroken(Exception):
    """Reports that the other end is gone or does not take part."""


class Link(abc.ABC):
    """Sends weights: the trainer's end, on its main process alone."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[Tensor | None] = [None, None]

    @abc.abstractmethod
    def offers(self) -> list[Message]:
        """Returns for each server the offer that its processes join with (`make_receiver`)."""

    def connect(self, given_up: Callable[[], bool]) -> None:  # noqa: B027 (memory has nothing to wait for)
        """Waits until all processes of the servers have joined, or until `given_up`. Raises LinkBroken."""

    def buffer(self, turn: int, size: int) -> Tensor:
        """Returns buffer `turn`, of `size` bytes or more."""
        held = self._buffers[turn]
        if held is None or held.numel() < size:
            self._buffers[turn] = None  # frees its memory before the next
            self._buffers[turn] = held = self._make(turn, size)
        return held

    def _make(self, turn: int, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    @abc.abstractmethod
    def describe(self, bucket: Bucket) -> list[Message]:
        """Returns for each server the description of a bucket, with which it takes the bucket from this link."""

    @abc.abstractmethod
    def send(self, bucket: Bucket, given_up: Callable[[], bool]) -> None:
        """Returns when the bucket is on its way, or when `given_up`. Raises LinkBroken.

        The device has written the bucket. The servers have its description, or are getting it.
        """

    def rest(self) -> None:
        """Gives the buffers' memory back, until the next bucket; once more when the servers have let go of it."""
        self._buffers = [None, None]
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # else memory that another process mapped is freed late or never

    def leave(self) -> None:  # noqa: B027 (memory has nobody who waits)
        """Tells processes waiting for a bucket that there are no more."""

    def close(self) -> None:
        self.leave()
        self.rest()


def _store(host: str, port: int, *, is_master: bool = False) -> dist.TCPStore:
    return dist.TCPStore(host, port, is_master=is_master, wait_for_workers=False, timeout=delta(JOIN_S))


class BroadcastLink(Link):
    """Sends weights in a process group. The trainer is rank 0 and the servers' processes come after it.

    host: the trainer's address as the servers see it. workers: the number of processes of each server. greets: the
    servers' ends are of this module, and confirm that they have met.
    """

    def __init__(
        self, device: torch.device, host: str, workers: Sequence[int], *, timeout_s: float, greets: bool = True
    ) -> None:
        super().__init__(device)
        self._backend, self._greets = "nccl" if device.type == "cuda" else "gloo", greets
        self._timeout_s, self._workers, self._host = timeout_s, workers, host
        # a new name, because a server may still have the group of a killed run
        self._name = f"mrl-{secrets.token_hex(8)}"
        self._store = _store(host, 0, is_master=True)
        # a second client, because the first is locked while it waits for others to join
        self._bell = _store(host, self._store.port)
        self._group: list[dist.Backend] = []  # at most one. Nothing else holds it, so that `end_group` can drop it

    def offers(self) -> list[Message]:
        whole = {
            "protocol": PROTOCOL, "link": "broadcast", "address": self._host, "port": self._store.port,
            "size": 1 + sum(self._workers), "name": self._name, "backend": self._backend,
            "timeout_s": self._timeout_s, "greets": self._greets,
        }  # fmt: skip
        return [whole | {"rank": 1 + sum(self._workers[:i])} for i in range(len(self._workers))]

    def connect(self, given_up: Callable[[], bool]) -> None:
        def meet() -> dist.Backend:
            group = make_group(self._store, self.offers()[0] | {"rank": 0}, when_broken=LET_BE)
            if self._greets:
                connect_all(group, self._device, self._timeout_s)
            return group

        group = self._in_thread(meet, given_up, "the processes do not meet: ")
        if group is not None:
            self._group = [group]

    def _in_thread(self, act: Callable[[], T], given_up: Callable[[], bool], words: str = "") -> T | None:
        """Returns the result of `act`, or None if `given_up` comes first. Raises LinkBroken.

        It runs in a thread that does not keep the process alive. Nothing ends the search for a server that failed.
        NCCL's first broadcast of a group also meets the others on the host, and does not return without them.
        """
        done: queue.SimpleQueue[T | Exception] = queue.SimpleQueue()

        def run() -> None:
            try:
                if self._device.type == "cuda":
                    torch.cuda.set_device(self._device)  # the default of a new thread is the first GPU
                done.put(act())
            except Exception as error:
                done.put(error)

        threading.Thread(target=run, daemon=True).start()
        while done.empty():
            if given_up():
                return None
            time.sleep(_POLL_S)
        result = done.get()
        if isinstance(result, Exception):
            raise LinkBroken(f"{words}{result}") from result
        return result

    def describe(self, bucket: Bucket) -> list[Message]:
        return [bucket.layout] * len(self._workers)

    def send(self, bucket: Bucket, given_up: Callable[[], bool]) -> None:
        until_s = time.monotonic() + self._timeout_s
        work = self._in_thread(lambda: self._broadcast(bucket.data), given_up)
        if work is None:
            return
        try:
            while not work.is_completed():
                if given_up():
                    return
                if time.monotonic() > until_s:  # NCCL has no timeout of its own here (`LET_BE`)
                    raise LinkBroken(f"a bucket was not taken in {self._timeout_s:g} s")
                time.sleep(_POLL_S)
            check(work)
        except RuntimeError as error:
            raise LinkBroken(str(error)) from error

    def _broadcast(self, data: Tensor) -> dist.Work:
        if not self._group:
            raise RuntimeError("the link was closed meanwhile")
        return self._group[0].broadcast([data], from_rank_0(self._timeout_s))

    def leave(self) -> None:
        self._bell.set(LEFT, "1")

    def close(self) -> None:
        super().close()
        end_group(self._group)


class SharedMemoryLink(Link):
    """Shares memory of the trainer that the processes of `servers` servers map, all on this machine.

    Host memory is in files that a trainer locks as long as it lives. Files of a trainer that was killed are removed.
    """

    def __init__(self, device: torch.device, servers: int) -> None:
        super().__init__(device)
        self._servers = servers
        self._files: list[tuple[pathlib.Path, int] | None] = [None, None]  # with the locked descriptor
        self._handles: list[Message] = [{}, {}]

    def offers(self) -> list[Message]:
        return [{"protocol": PROTOCOL, "link": "ipc"}] * self._servers

    def _make(self, turn: int, size: int) -> Tensor:
        if self._device.type == "cuda":
            buffer = super()._make(turn, size)
            self._handles[turn] = _cuda_handle(buffer)
            return buffer
        self._unlink(turn)
        _remove_abandoned()
        file = _SHM / f"{_OWN}-{os.getpid()}-{secrets.token_hex(8)}"
        made = file.with_name(f".{file.name}")  # _remove_abandoned skips this name; the file is not locked yet
        descriptor = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        made.rename(file)
        self._files[turn], self._handles[turn] = (file, descriptor), {"file": str(file), "bytes": size}
        try:
            os.posix_fallocate(descriptor, 0, size)  # else a write beyond free memory is a SIGBUS
        except BaseException:
            self._unlink(turn)
            raise
        return torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)

    def describe(self, bucket: Bucket) -> list[Message]:
        return [bucket.layout | {"memory": self._handles[bucket.turn]}] * self._servers

    def send(self, bucket: Bucket, given_up: Callable[[], bool]) -> None:
        """Does nothing: the servers read the bucket where it is."""

    def rest(self) -> None:
        super().rest()
        for turn in (0, 1):
            self._unlink(turn)

    def _unlink(self, turn: int) -> None:
        held, self._files[turn] = self._files[turn], None
        if held is not None:
            held[0].unlink(missing_ok=True)
            os.close(held[1])


def _remove_abandoned() -> None:
    """Removes the files of trainers that are no more: nobody has a lock on them."""
    for file in _SHM.glob(f"{_OWN}-*"):
        with contextlib.suppress(OSError):  # it is locked, another user's, or gone
            descriptor = os.open(file, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.unlink()
            finally:
                os.close(descriptor)


# ------------------------------------------------------------------------------------------------------ a server's end


class LinkReceiver(abc.ABC):
    """Receives weights in a server's process."""

    @abc.abstractmethod
    def receive(self, update: Message, device: torch.device) -> Tensor:
        """Returns the bytes of a bucket that `Link.describe` described, in memory of their own."""

    def rest(self) -> None:  # noqa: B027 (a group has none)
        """Unmaps the trainer's memory."""

    def close(self) -> None:
        self.rest()


def make_receiver(offer: Message, worker: int) -> LinkReceiver:
    """Joins a link as the server's process number `worker`. Raises ValueError, RuntimeError."""
    if offer.get("protocol") != PROTOCOL:
        raise ValueError(f"the trainer's mrl says protocol {offer.get('protocol')} and this one's {PROTOCOL}")
    return _BroadcastReceiver(offer, worker) if offer["link"] == "broadcast" else _SharedMemoryReceiver()


class _BroadcastReceiver(LinkReceiver):
    def __init__(self, offer: Message, worker: int) -> None:
        self._store = _store(offer["address"], offer["port"])
        self._timeout_s = offer["timeout_s"]
        self._group = [make_group(self._store, offer | {"rank": offer["rank"] + worker}, when_broken=CLEAN_UP)]
        if offer["greets"]:
            where = "cpu" if offer["backend"] == "gloo" else f"cuda:{torch.cuda.current_device()}"
            connect_all(self._group[0], torch.device(where), self._timeout_s)

    def receive(self, update: Message, device: torch.device) -> Tensor:
        """Receives a bucket.

        Raises RuntimeError, also if the trainer leaves or is killed during it, which not every transport of NCCL
        reports.
        """
        data = torch.empty(size_of(update), dtype=torch.uint8, device=device)
        work = self._group[0].broadcast([data], from_rank_0(self._timeout_s))
        asked_s = time.monotonic()
        while not work.is_completed():
            time.sleep(_POLL_S)
            if time.monotonic() > asked_s + ASKED_S:
                asked_s = time.monotonic()
                if self._is_left():
                    del work
                    self.close()
                    raise RuntimeError("the trainer has left in the middle of a bucket")
        check(work)
        return data

    def _is_left(self) -> bool:
        try:
            return self._store.check([LEFT])
        except RuntimeError:  # the store is in the trainer's process, which is gone
            return True

    def close(self) -> None:
        end_group(self._group)


class _SharedMemoryReceiver(LinkReceiver):
    def __init__(self) -> None:
        self._mapped: dict[tuple[tuple[str, Any], ...], Tensor] = {}

    def receive(self, update: Message, device: torch.device) -> Tensor:
        memory = update["memory"]
        # The handle alone is no key: it is that of a whole cudaMalloc block, and both buffers may lie in one.
        key = tuple(sorted(memory.items()))
        if key not in self._mapped:
            if "file" in memory:
                if not os.path.exists(memory["file"]):
                    raise ValueError("the trainer's memory is not here: is the server on another machine?")
                self._mapped[key] = torch.from_file(
                    memory["file"], shared=True, size=memory["bytes"], dtype=torch.uint8
                )
            else:
                self._mapped[key] = _from_cuda_handle(memory)
        # a copy, because the trainer writes the next bucket but one here, and a loader may keep views of this one
        data = self._mapped[key][: size_of(update)].to(device, copy=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return data

    def rest(self) -> None:
        self._mapped.clear()


def place() -> Message:
    """Returns this process's machine, and its visible GPUs by UUID."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
    shm = _SHM.stat() if _SHM.exists() else None
    # with /dev/shm, because containers of one machine may each have their own
    machine = [boot.read_text().strip() if boot.exists() else os.uname().nodename, shm and shm.st_dev]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {"machine": machine, "gpus": [str(torch.cuda.get_device_properties(i).uuid) for i in range(count)]}


# ------------------------------------------------------------------------------------------------- CUDA's IPC handles


def _cuda_handle(buffer: Tensor) -> Message:
    device, *shared = buffer.untyped_storage()._share_cuda_()
    handle, size, offset, counter, counter_offset, event, synchronize = shared
    return {
        "gpu": str(torch.cuda.get_device_properties(device).uuid),
        "bytes": buffer.numel(),
        "handle": _text(handle), "storage_bytes": size, "storage_offset": offset, "counter": _text(counter),
        "counter_offset": counter_offset, "event": _text(event), "synchronize": synchronize,
    }  # fmt: skip


def _from_cuda_handle(memory: Message) -> Tensor:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    here = place()["gpus"]
    if memory["gpu"] not in here:
        raise ValueError(f"the trainer's GPU {memory['gpu']} is none of those that the server sees")
    return rebuild_cuda_tensor(
        Tensor, (memory["bytes"],), (1,), 0, torch.UntypedStorage, torch.uint8, here.index(memory["gpu"]),
        _decoded(memory["handle"]), memory["storage_bytes"], memory["storage_offset"], False,
        _decoded(memory["counter"]), memory["counter_offset"], _decoded(memory["event"]), memory["synchronize"],
    )  # fmt: skip


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _decoded(text: str) -> bytes:
    return base64.b64decode(text)
