"""Links to SGLang servers on the trainer's machine: CUDA IPC, in the form that /update_weights_from_tensor takes.

Each process of a server gets a pickle of its own, as SGLang's `MultiprocessingSerializer` makes it. That is the
standard library's ForkingPickler with torch's reductions: they say where a tensor of a GPU is, without its content.
SGLang 0.5.23 unpickles names from a list alone (`SafeUnpickler`), so there is nothing of mrl in it. SGLang need not be
installed here.
"""

from __future__ import annotations

import base64
import io
import types
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from mrl.engine import links


class PickledLink(links.Link):
    """Memory of the trainer's GPU that SGLang's processes map. workers: how many processes each server has."""

    def __init__(self, device: torch.device, workers: Sequence[int]) -> None:
        super().__init__(device)
        self._workers = workers

    def offers(self) -> list[dict[str, Any]]:
        return [{"protocol": links.PROTOCOL, "link": "ipc"}] * len(self._workers)

    def buffer(self, turn: int, size: int) -> Tensor:
        """Returns a new buffer each time, because processes may still read the one before.

        A server answers when one of its processes has loaded a bucket. torch keeps the memory until all have let go of
        it.
        """
        return self._make(turn, size)

    def describe(self, bucket: links.Bucket) -> list[dict[str, Any]]:
        return [{"pickles": [_pickled(bucket) for _ in range(workers)]} for workers in self._workers]

    def send(self, bucket: links.Bucket, given_up: Callable[[], bool]) -> None:
        """Does nothing: the bucket is where the servers read it."""


def _pickled(bucket: links.Bucket) -> str:
    """Returns a bucket in SGLang's format `flattened_bucket`, for one process to read once: torch counts readers."""
    parts, at = [], 0
    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        kind, size = getattr(torch, dtype), torch.Size(shape)
        end = at + size.numel() * kind.itemsize
        # SGLang makes its FlattenedTensorMetadata of what has these attributes.
        parts.append(
            types.SimpleNamespace(name=name, shape=size, dtype=kind, start_idx=at, end_idx=end, numel=end - at)
        )
        at = end
    content = io.BytesIO()
    _Pickler(content).dump({"flattened_tensor": bucket.data, "metadata": parts})
    return base64.b64encode(content.getvalue()).decode()


class _Pickler(ForkingPickler):
    def reducer_override(self, value: object) -> Any:
        """Names a tensor's GPU by its UUID, for SGLang to look up: another GPU may have its number there."""
        if not isinstance(value, Tensor):
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(value)
        if rebuild is reductions.rebuild_cuda_tensor:
            *before, device = arguments[:7]
            arguments = (*before, str(torch.cuda.get_device_properties(device).uuid), *arguments[7:])
        return rebuild, arguments
