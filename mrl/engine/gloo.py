"""One gloo device for all process groups of a process.

torch gives every gloo group a device of its own, with a thread that wakes up a hundred times a second though nothing is
sent (3 % of a core for 40 groups). A layout has tens of groups, and each role has a layout; groups of one device share
its thread.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist

_devices: list = []


def share_device() -> None:
    """Gloo groups that are made from now on share the device of the first. Idempotent.

    That one is chosen by torch as ever: by GLOO_SOCKET_IFNAME, or the address of the host's name.
    """
    gloo = dist.ProcessGroupGloo
    own_init = gloo.__init__
    if hasattr(own_init, "__wrapped__"):
        return

    @functools.wraps(own_init)
    def init(self: Any, store: Any, rank: int, size: int, timeout: Any = dist.default_pg_timeout) -> None:
        if isinstance(timeout, gloo._Options):
            own_init(self, store, rank, size, timeout)
        elif not _devices:
            own_init(self, store, rank, size, timeout)
            _devices.extend(self.options._devices)
        else:
            options = gloo._Options()
            options._devices, options._threads, options._timeout = _devices, 2 * len(_devices), timeout
            own_init(self, store, rank, size, options)

    gloo.__init__ = init
