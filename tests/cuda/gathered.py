"""The gathering of one rank's weights into the buckets of a link, on fake CUDA tensors."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.cuda import fake, models  # before mrl: fake.py says what torch is here
from tests.cuda.cases import Case

BUCKET = 2**20
"""Bytes, of a buffer that has room for any tensor."""


@dataclasses.dataclass(frozen=True)
class Gathered:
    devices: list[str]  # that tensors came on
    waits: dict[str, int]  # of the host, by line
    largest: int  # bytes of a tensor
    whole: int  # bytes of all tensors
    peak: int  # bytes that the device held beyond the model and the buckets


def gather(case: Case) -> Gathered:
    """What the main process does in a hand-over through a link, but for sending; nothing of mrl is replaced."""
    fake.join_world(case.rank, case.world)
    from mrl.engine import links
    from mrl.engine.megatron.engine import MegatronEngine
    from tests.cuda import update

    folder = models.write(case.model, Path(tempfile.mkdtemp()), case.layers, **case.changes)
    sizes: list[int] = []
    devices: set[str] = set()

    def noted(weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            sizes.append(tensor.nbytes)
            devices.add(tensor.device.type)
            yield name, tensor
            del tensor

    with fake.Fake() as watched:
        engine = MegatronEngine(dataclasses.replace(update.config_of(case, folder), optimizer=None))
        engine.init_model()
        buffers = [torch.empty(2**33, dtype=torch.uint8, device=engine.device) for _ in range(2)]
        watched.syncs.clear()
        memory = watched.memory
        before = memory.peak = memory.alive
        for _ in links.buckets(noted(engine.hf_weights()), BUCKET, lambda turn, size: buffers[turn]):
            pass
    return Gathered(sorted(devices), dict(watched.syncs), max(sizes), sum(sizes), memory.peak - before)
