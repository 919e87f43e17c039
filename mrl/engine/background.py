"""Writes checkpoints in a thread of each rank while training continues (`checkpoint.background`).

A save copies the state to host memory between two steps. From then on the thread uses only the copy. The threads of all
ranks talk over a gloo group of their own, so their messages never come between the collectives of training. They end in
`atomic_checkpoint.writing` as every save does. The folder gets its name once all ranks have their files on disk, so a
kill leaves the previous checkpoint.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from mrl.engine.atomic_checkpoint import RankGroup
from mrl.engine.collective import TIMEOUT, max_over_ranks
from mrl.errors import CheckpointError, UserError, first_line


class _OtherRankFailed(Exception):
    """Reports that another rank's thread has failed."""


Write = Callable[[str, RankGroup], None]
"""Writes this rank's part of the copied state into a folder; `RankGroup` joins the threads of all ranks."""


def copy_to_host(tensor: Tensor) -> Tensor:
    """Returns a copy in host memory; one of a CUDA tensor is whole after the next `wait_for_copies`."""
    if not tensor.is_cuda:
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor.detach(), non_blocking=True)


def wait_for_copies(device: torch.device) -> None:
    """Waits until the copies that `copy_to_host` began are whole."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def error_line(error: BaseException, rank: int) -> UserError:
    """Returns an error of a thread as a line for the user."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, CheckpointException):  # torch's: the error of each rank, with a traceback
        rank, error = next((rank, failure[0]) for rank, failure in error.failures.items())
    line = f"checkpoint.background: on rank {rank} a checkpoint could not be written"
    if isinstance(error, OSError):
        return CheckpointError(f"{line} ({error.strerror}); give it room, and run the same command again")
    return CheckpointError(f"{line} ({type(error).__name__}: {first_line(error)})")


class BackgroundSaver:
    """Writes one checkpoint at a time. Methods are collective unless they say otherwise."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._group: dist.ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        self._error: UserError | None = None
        self._write_s = 0.0

    @property
    def busy(self) -> bool:
        """Returns whether a save has begun and neither `finish` nor `poll` has reported its end; the same on every
        rank."""
        return self._thread is not None

    def begin(self, work: Callable[[RankGroup], None]) -> None:
        """Starts `work` in a thread. If one is under way, it waits for that first (`finish`)."""
        assert not self.busy
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._error = None
        ranks = RankGroup(dist.get_rank(), dist.get_world_size(), self._gather, self._group)

        def run() -> None:
            began_s = time.perf_counter()
            try:
                if self.device.type == "cuda":
                    torch.cuda.set_device(self.device)  # the default of a new thread is the first GPU
                work(ranks)
            except _OtherRankFailed:
                pass
            except BaseException as error:  # raised between the next two steps
                self._error = error_line(error, ranks.rank)
                # The other threads learn of it in their next wait. If one is gone, gloo raises RuntimeError.
                with contextlib.suppress(_OtherRankFailed, RuntimeError):
                    self._gather(self._error)
            self._write_s = time.perf_counter() - began_s

        self._thread = threading.Thread(target=run, name="mrl-checkpoint", daemon=True)
        self._thread.start()

    def _gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks' threads.

        Raises _OtherRankFailed if one of them has failed instead. All ranks get the first such error.
        """
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, value, group=self._group)
        if failed := [one for one in everyone if isinstance(one, UserError)]:
            self._error = failed[0]
            raise _OtherRankFailed
        return everyone

    def poll(self) -> float | None:
        """Returns the seconds that writing took, once, when all ranks have ended; None before.

        Raises the error of a save that failed.
        """
        if self._thread is None:
            return None
        (running,) = max_over_ranks(self.device, float(self._thread.is_alive()))
        return None if running else self.finish()

    def finish(self) -> float | None:
        """Waits for the save under way, if any. Returns the seconds that writing took. Raises the error of a failed
        save."""
        if self._thread is None:
            return None
        self.wait()
        (seconds,) = max_over_ranks(self.device, self._write_s)
        if self._error is not None:
            raise self._error
        return seconds

    def wait(self) -> UserError | None:
        """Waits for this rank's thread, without messages to other ranks. Returns its error. Not collective."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._error
