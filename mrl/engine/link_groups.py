"""Makes the process group that `links.py` sends weights through: NCCL's on GPUs, else gloo's.

Its members are the trainer and the servers' processes, beside the default group of each. Both ends use this module, so
it imports only torch.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

JOIN_S = 60.0
"""Longest wait for all processes of a group to meet."""

CLOSE_S = 2.0
"""Longest wait for a group's connections to be closed."""

LEFT, ASKED_S = "left", 1.0
"""The key of a group's store once the trainer has left, and how often a server's process looks for it."""


def delta(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)


def from_rank_0(timeout_s: float) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank, options.timeout = 0, delta(timeout_s)
    return options


_ASYNC = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
LET_BE, CLEAN_UP = "0", "2"
"""Values of torch's variable for its watchdog, when a broadcast fails or takes too long. By default the watchdog ends
the process: a trainer because of a server, or a server because of a killed trainer."""


def check(work: dist.Work) -> None:
    """Raises RuntimeError if an ended broadcast has failed. NCCL's `wait` reports it only with a timeout."""
    work.wait(delta(JOIN_S))


def connect_all(group: dist.Backend, device: torch.device, timeout_s: float) -> None:
    """Sends a byte to all, so that NCCL connects them. A failure to connect then shows before weights are lost."""
    work = group.broadcast([torch.zeros(1, dtype=torch.uint8, device=device)], from_rank_0(timeout_s))
    work.wait()


def make_group(store: dist.Store, offer: dict[str, Any], *, when_broken: str) -> dist.Backend:
    """Returns a group of its own, beside the process's default one. when_broken: LET_BE or CLEAN_UP, for NCCL.

    The prefixes are those of torch's `_new_process_group_helper`, because SGLang joins through it.
    """
    name, device = offer["name"], "cuda" if offer["backend"] == "nccl" else "cpu"
    prefixed: dist.Store = store
    for prefix in (name, f"{name}/", f"{device}/"):
        prefixed = dist.PrefixStore(prefix, prefixed)
    if offer["backend"] == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = delta(offer["timeout_s"])
        with _environment(_ASYNC, when_broken):  # ProcessGroupNCCL's constructor reads the variable
            return dist.ProcessGroupNCCL(prefixed, offer["rank"], offer["size"], options)
    return dist.ProcessGroupGloo(prefixed, offer["rank"], offer["size"], delta(JOIN_S))


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def end_group(held: list[dist.Backend]) -> None:
    """Closes the connections of the group in `held`. Pending operations of other members fail.

    gloo closes its connections with the last reference, after operations under way have ended. A process that takes no
    part can delay this until the group's timeout. So it runs in a daemon thread.
    """

    def drop() -> None:
        group = held.pop()
        if not isinstance(group, dist.ProcessGroupGloo):
            group.abort()

    if held:
        thread = threading.Thread(target=drop, daemon=True)
        thread.start()
        thread.join(CLOSE_S)
