"""The layout of the FSDP engine's processes: groups of ranks with one copy of the weights, and their copies.

    dim          ranks along it hold
    replicate    the same shards (HSDP: gradients are averaged over it after they are over "shard")
    shard        different shards of every weight; they gather them from each other, so these are neighbours

A rank's data do not depend on its weights. `engine.parallel.cp` neighbours share each sequence (see
ulysses.py) and are one data-parallel rank, as `mrl.parallel` numbers them: `rank = cp_rank + cp * dp_rank`. The weights
are sharded and copied over all ranks, and gradients averaged over all.
"""

from __future__ import annotations

import dataclasses
import functools

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mrl.config.checks import check_replicate, parallel_dims
from mrl.config.schema import EngineConfig
from mrl.engine.fsdp.ulysses import Ulysses


@dataclasses.dataclass(frozen=True)
class Mesh:
    """The processes of one engine."""

    whole: DeviceMesh  # with the dims of this file
    data: DeviceMesh | None  # as (dp, cp); None where each has sequences of its own

    @property
    def weights(self) -> DeviceMesh:
        """The mesh for `fully_shard`: one dim if nothing is replicated, else (replicate, shard)."""
        copies = self.whole["replicate"].size()  # of every weight
        return self.whole["replicate", "shard"] if copies > 1 else self.whole["shard"]

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
        """Ranks with different data, in data-parallel order: one of each group that shares data."""
        return dist.group.WORLD if self.data is None else self.data.get_group("dp")

    @property
    def ulysses(self) -> Ulysses:
        """Ranks that share this rank's sequences."""
        return Ulysses(None if self.data is None else self.data.get_group("cp"))


def build_mesh(device_type: str, engine: EngineConfig) -> Mesh:
    """Lays all processes out as `engine` says. Collective. Raises ConfigError if their number does not fit."""
    world, replicate = dist.get_world_size(), engine.fsdp.replicate
    check_replicate(engine, world)
    dims = parallel_dims(engine.parallel, world)
    shape = (replicate, world // replicate)
    whole = init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))
    return Mesh(whole, _data_mesh(device_type, dims.dp, dims.cp) if dims.cp > 1 else None)


@functools.cache
def _data_mesh(device_type: str, dp: int, cp: int) -> DeviceMesh:
    """Makes the mesh once: groups cost file descriptors and seconds. Engines share it, since it holds no state."""
    return init_device_mesh(device_type, (dp, cp), mesh_dim_names=("dp", "cp"))
