"""How the processes of the FSDP engine lie: which of them share the weights, and which hold copies.

    dim          ranks along it hold
    replicate    the same shards (HSDP: gradients are averaged over it after they are over "shard")
    shard        different shards of every weight; they gather them from each other, so these are neighbours

Every rank is a data-parallel rank of its own.
"""

from __future__ import annotations

import dataclasses

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mrl.config.checks import check_replicate
from mrl.config.schema import EngineConfig


@dataclasses.dataclass(frozen=True)
class Mesh:
    """The processes of one engine. whole: all of them, with the dims of this file."""

    whole: DeviceMesh

    @property
    def weights(self) -> DeviceMesh:
        """What `fully_shard` takes: one dim where nothing is replicated, else (replicate, shard)."""
        return self.whole["replicate", "shard"] if self.replicate > 1 else self.whole["shard"]

    @property
    def replicate(self) -> int:
        """Copies of every weight."""
        return self.whole["replicate"].size()

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """Ranks that hold one copy of the model between them."""
        return self.whole.get_group("shard")

    @property
    def replica_group(self) -> dist.ProcessGroup:
        """Ranks that hold the same shards as this one."""
        return self.whole.get_group("replicate")

    @property
    def dp_group(self) -> dist.ProcessGroup:
        """Ranks that have different data, in the order of their data-parallel index."""
        return dist.group.WORLD

    @property
    def dp_rank(self) -> int:
        return dist.get_rank()

    @property
    def dp_size(self) -> int:
        return dist.get_world_size()


def build_mesh(device_type: str, engine: EngineConfig) -> Mesh:
    """Lays all processes out as `engine` says. Collective."""
    world, replicate = dist.get_world_size(), engine.fsdp.replicate
    check_replicate(engine, world)
    shape = (replicate, world // replicate)
    return Mesh(init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard")))
