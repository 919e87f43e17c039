"""The gathering of one rank's weights into the buckets of a link, on fake CUDA tensors."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from tests.cuda import fake, models  # before mrl: fake.py says what torch is here
from tests.cuda.cases import Case

BUCKET = 64 * 2**20


@dataclasses.dataclass(frozen=True)
class Gathered:
    devices: list[str]  # that tensors are on
    waits: dict[str, int]  # of the host, by line
    bytes: int  # of all tensors
    peak: int  # bytes on the device beyond the model
    bound: int  # two buckets, the largest tensor, and what is on its way to it


def gather(case: Case) -> Gathered:
    """Rank 0 of the Megatron engine; nothing of mrl is replaced."""
    fake.join_world(case.rank, case.world)
    from mrl.engine import links
    from mrl.engine.megatron import streams
    from mrl.engine.megatron.engine import MegatronEngine
    from tests.cuda import update

    folder = models.write(case.model, Path(tempfile.mkdtemp()), case.layers, **case.changes)
    sizes: list[int] = []
    devices: set[str] = set()

    def noted(weights):
        for name, tensor in weights:
            sizes.append(tensor.nbytes)
            devices.add(tensor.device.type)
            yield name, tensor
            del tensor

    with fake.Fake(fake.Given()) as watched:
        config = dataclasses.replace(update.config_of(case, folder), optimizer=None)
        engine = MegatronEngine(config)
        engine.init_model()
        watched.syncs.clear()
        with fake.Fake(fake.Given()) as inside:
            made = {}

            def buffer(turn: int, size: int) -> torch.Tensor:
                if turn not in made or made[turn].numel() < size:
                    made[turn] = None
                    made[turn] = torch.empty(size, dtype=torch.uint8, device="cuda")
                return made[turn]

            for _ in links.buckets(noted(engine.hf_weights()), BUCKET, buffer):
                pass
            peak, waits = inside.memory.peak, dict(inside.syncs)
    assert dist.get_rank() == 0
    largest = max(sizes)
    bound = 2 * max(BUCKET, largest) + largest + max(streams.BATCH_BYTES, largest)
    return Gathered(sorted(devices), waits, sum(sizes), peak, bound)
