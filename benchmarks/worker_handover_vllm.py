"""`mrl.rollout.vllm_worker` in the server's processes, with the seconds that its parts take."""

from __future__ import annotations

import collections
import functools
import time
from collections.abc import Callable
from typing import Any

from mrl.engine import links
from mrl.rollout import vllm_worker

SECONDS: collections.Counter[str] = collections.Counter()


def timed(owner: type, name: str) -> None:
    """From now on `SECONDS` has the seconds of a method."""
    method: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            SECONDS[name] += time.perf_counter() - began

    setattr(owner, name, call)


class Worker(vllm_worker.Worker):
    def handover_seconds(self) -> dict[str, float]:
        """Returns the seconds of each part since the last call."""
        found = dict(SECONDS)
        SECONDS.clear()
        return found


for end in (links._BroadcastReceiver, links._SharedMemoryReceiver):
    timed(end, "receive")
for part in ("start_weight_update", "update_weights", "finish_weight_update"):
    timed(vllm_worker.Engine, part)
timed(Worker, "mrl_reload")
