"""Worlds of processes that run many test cases: each world size starts once in a test session, or anew where they hold
too much memory.

A case is "package.module:function" with keyword arguments. Every rank of a world imports and calls it, with a gloo
process group initialised, RANK, WORLD_SIZE and so on set, and the import path of the test's process; rank 0's return value comes back (pickled). A case
that fails on any rank, crashes or takes too long ends its world, and the next case gets a new one.

Worlds of device "cuda" have NCCL beside gloo, and all ranks on the one GPU 0, which NCCL refuses but for processes of several
machines: each rank says that it is a machine (NCCL_HOSTID), and NCCL talks over TCP. Numbers are those of GPUs; speeds are not.

    results = run_world(2, [Case("tests.engine.cases:loss", {"family": "llama"})])
    results[0].get()        # rank 0's value, or an AssertionError with the first failing rank's traceback
"""

from __future__ import annotations

import atexit
import dataclasses
import faulthandler
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import psutil

# Imported once, in the server that the workers are forked from; one that is not installed is passed over there. Without the engines
# each rank imports for 4 s before its first case, and keeps a copy of its own.
PRELOAD = (
    "torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "transformers.modeling_utils", "megatron.core",
    "datasets", "peft", "mrl.engine.fsdp.engine", "mrl.engine.megatron.engine", "tests.engine.contract",
    "tests.frozen",
)  # fmt: skip
OTHERS_GRACE_S = 3.0  # how long the other ranks have after one has failed
MOST_BYTES = 5 << 30
"""That all worlds may hold between two cases, where what ranks still share with the process they were forked from counts for each (15 new ranks:
6 GiB, of which 4 are their own). A rank grows from case to case, to a GiB and more; two test processes and two vLLM servers that
have no memory left stand still for minutes."""


@dataclasses.dataclass(frozen=True)
class Case:
    """function: "package.module:function". kwargs: picklable."""

    function: str
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    timeout_s: float = 180.0


@dataclasses.dataclass(frozen=True)
class Result:
    """What a case gave. error: None, or the traceback of the first rank that failed."""

    case: Case
    value: Any = None
    error: str | None = None

    def get(self) -> Any:
        if self.error is not None:
            raise AssertionError(f"{self.case.function}({self.case.kwargs}) failed:\n{self.error}")
        return self.value


class World:
    """`size` processes with a gloo process group, with NCCL too on a GPU, waiting for cases."""

    def __init__(self, size: int, device: str = "cpu") -> None:
        self.size = size
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOAD) if device == "cpu" else ["torch"])  # not TE: see `_serve`
        self.folder = tempfile.TemporaryDirectory(prefix="world")
        self.pipes, self.processes = [], []
        port = _free_port()
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, port, self.folder.name, device, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True, name=f"rank {rank} of {size}")
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, case: Case) -> Result:
        """Runs one case on all ranks. After an error the world is ended and must not be used again."""
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps((case.function, case.kwargs, sys.path)))
        waiting, value = dict(zip(self.pipes, range(self.size), strict=True)), None
        deaths: list[str] = []  # come first: others may hear of one, and fail by it, before it is seen here
        errors: list[str] = []
        deadline = time.monotonic() + case.timeout_s
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in multiprocessing.connection.wait(list(waiting), timeout=left):
                rank = waiting.pop(pipe)
                try:
                    error, answer = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self.processes[rank].join(timeout=5)
                    with open(_crash_file(self.folder.name, rank)) as file:
                        deaths.append(f"rank {rank} died with exit code {self.processes[rank].exitcode}\n{file.read()}")
                else:
                    errors += [] if error is None else [error]
                    value = answer if rank == 0 else value
                if deaths or errors:
                    deadline = min(deadline, time.monotonic() + OTHERS_GRACE_S)
        if waiting and not deaths + errors:
            errors = [f"ranks {sorted(waiting.values())} gave no answer within {case.timeout_s} s"]
        if deaths + errors:
            self.close()
            return Result(case, error=(deaths + errors)[0])
        return Result(case, value=value)

    @property
    def alive(self) -> bool:
        return bool(self.processes) and all(process.is_alive() for process in self.processes)

    def memory(self) -> int:
        """Returns the bytes of its processes that are no file's."""
        sizes = [psutil.Process(process.pid).memory_info() for process in self.processes if process.is_alive()]
        return sum(size.rss - size.shared for size in sizes)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(timeout=10)
        self.pipes, self.processes = [], []
        self.folder.cleanup()


_worlds: dict[tuple[int, str], World] = {}
"""(size, device) -> world; the one that was used last comes last."""


def run_world(world_size: int, cases: Sequence[Case], device: str = "cpu") -> list[Result]:
    """Runs the cases in order in the world of that size, which is started where it is not up."""
    results, key = [], (world_size, device)
    for case in cases:
        world = _worlds.pop(key, None)
        if world is not None and not world.alive:
            world.close()
            world = None
        _worlds[key] = world or World(world_size, device)
        results.append(_worlds[key].run(case))
        _make_room()
    return results


def _make_room() -> None:
    """Ends worlds until the rest hold no more than they may: the one that was used longest ago first. CUDA's part is not counted."""
    held = {key: world.memory() for key, world in _worlds.items() if key[1] == "cpu"}
    for key in list(held):
        if sum(held.values()) > MOST_BYTES:
            del held[key]
            _worlds.pop(key).close()


def run_case(world_size: int, function: str, *, timeout_s: float = 180.0, **kwargs: Any) -> Any:
    """One case's value from rank 0; its error as an AssertionError."""
    return run_world(world_size, [Case(function, kwargs, timeout_s)])[0].get()


@atexit.register
def close_worlds() -> None:
    """Ends all worlds; tests/conftest.py calls it, and so does the interpreter's exit."""
    for world in _worlds.values():
        world.close()
    _worlds.clear()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _crash_file(folder: str, rank: int) -> str:
    """Returns the file of the Python lines that a rank was at when a signal ended it."""
    return os.path.join(folder, f"rank_{rank}.crash")


def _serve(rank: int, size: int, port: int, folder: str, device: str, pipe) -> None:
    """A worker: joins the process group, then answers cases until the pipe closes."""
    crash = open(_crash_file(folder, rank), "w")  # noqa: SIM115
    faulthandler.enable(crash)  # which stays open until the process ends
    import torch
    import torch.distributed as dist

    from mrl.engine.collective import share_device
    from mrl.mcore_models import platform

    if device == "cuda":
        platform.hide_what_does_not_load()  # as an engine does, before anything imports transformer-engine
    ranks: dict[str, Any] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    backend = "gloo"
    if device == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        ranks |= {"LOCAL_RANK": 0, "NCCL_HOSTID": f"machine-{rank}", "NCCL_SOCKET_IFNAME": "lo"}
        ranks |= {"NCCL_NET": "Socket", "NCCL_MNNVL_ENABLE": 0, "CUDA_DEVICE_MAX_CONNECTIONS": 1}
    os.environ.update({k: str(v) for k, v in ranks.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    torch.set_num_threads(1)
    timeout = timedelta(seconds=120)
    share_device()
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(
        backend, store=dist.FileStore(os.path.join(folder, "store"), size), rank=rank, world_size=size, timeout=timeout
    )
    while True:
        try:
            function, kwargs, sys.path[:] = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            return
        try:
            module, name = function.split(":")
            value = getattr(importlib.import_module(module), name)(**kwargs)
            answer = pickle.dumps((None, value if rank == 0 else None))
        except BaseException:
            answer = pickle.dumps((f"rank {rank} of {size}:\n{traceback.format_exc()}", None))
        pipe.send_bytes(answer)
