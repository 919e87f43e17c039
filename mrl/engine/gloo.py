"""Shares one gloo device among all process groups of a process.

By default torch gives every gloo group a device of its own. Its thread wakes up a hundred times a second even if
nothing is sent (3 % of a core for 40 groups). A layout has tens of groups, and each role has a layout. Groups with one
device share its thread.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist

from mrl import patches

_devices: list = []


def share_device() -> None:
    """Makes later gloo groups share the device of the first. Idempotent.

    torch chooses the first one as usual: by GLOO_SOCKET_IFNAME, or by the address of the host's name.
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

    patches.replace({"torch.distributed:ProcessGroupGloo.__init__": init})
