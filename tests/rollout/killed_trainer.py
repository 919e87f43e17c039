"""A trainer that is killed in the middle of a hand-over: of a process that imports little."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

import torch

from mrl.engine import links


def run(pipe: Connection) -> None:
    """Has memory for a server, joins another one's process, and sends nothing."""
    cpu = torch.device("cpu")
    memory, group = links.SharedMemoryLink(cpu, 1), links.BroadcastLink(cpu, "127.0.0.1", [1], timeout_s=60)
    memory.buffer(0, 100)
    pipe.send((memory._handles[0]["file"], group.offers()[0]))
    group.connect(lambda: False)
    time.sleep(60)
