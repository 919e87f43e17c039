"""What the ranks of test_checkpoint_memory.py and test_optim_state.py do with a Megatron engine's checkpoint."""

from __future__ import annotations

import ctypes
import gc
import os
import pathlib
import re
import resource
import signal

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from mrl.config.schema import RoleConfig
from mrl.engine.collective import all_ranks
from mrl.engine.megatron.engine import MegatronEngine
from mrl.engine.megatron.optim import optimizers_of, shards
from mrl.engine.torch_dist import boxes
from mrl.engine.torch_dist.reader import TorchDistReader
from mrl.errors import CheckpointError
from tests.engine.contract import make_engine


def growth_of_save_and_load(config: RoleConfig, folder: str, block_bytes: int) -> dict[str, list[int]]:
    """Of every rank: bytes of its state, and by how much a save and a load raise its peak of memory.

    Each entry of the state is another number, and none is lost or moved.
    """
    boxes.BLOCK_BYTES = block_bytes
    engine = engine_with_state(config)
    expected = [t.clone() for t in state_of(engine)]
    own = sum(t.numel() * t.itemsize for t in expected)
    save = _growth(lambda: engine.save_checkpoint(folder, global_step=1))
    for held in state_of(engine):
        held.zero_()
    load = _growth(lambda: engine.load_checkpoint(folder))
    for found, wanted in zip(state_of(engine), expected, strict=True):
        assert torch.equal(found, wanted)
    numbers = all_ranks().gather((own, save, load))
    return dict(zip(("own", "save", "load"), map(list, zip(*numbers, strict=True)), strict=True))


def engine_with_state(config: RoleConfig) -> MegatronEngine:
    """An engine whose master weights are its parameters, and whose moments are random."""
    engine = make_engine(config)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for part, _, main, _ in shards(engine.model.optimizer):
        part.optimizer.state[main] = {
            name: torch.randn(main.shape, generator=generator) for name in ("exp_avg", "exp_avg_sq")
        } | {"step": torch.tensor(3.0)}
    return engine


def state_of(engine: MegatronEngine) -> list[torch.Tensor]:
    """Parameters, master weights and moments of this rank, those in use."""
    state = [p.detach() for chunk in engine.model.chunks for p in chunk.parameters()]
    for part in optimizers_of(engine.model.optimizer):
        for group in part.optimizer.param_groups:
            for main in group["params"]:
                moments = part.optimizer.state[main]
                state += [main.detach(), moments["exp_avg"], moments["exp_avg_sq"], moments["step"]]
    return state


def _growth(act) -> int:
    """Bytes by which this process's peak while it acts is above what it had before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else it may take memory that it had given back before
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before = _status("VmRSS")
    act()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def megatron_reads(config: RoleConfig, folder: str) -> int:
    """dist_checkpointing gives every tensor of a checkpoint, the optimizer's too, as our reader does. Returns how many."""
    engine = engine_with_state(config)
    mcore = os.path.join(engine.save_checkpoint(folder, global_step=1), "mcore")
    with engine.model.state.installed():
        reader = TorchDistReader(mcore)
        assert any(key.startswith("optimizer.exp_avg_sq.") for key in reader.tensors)
        asked = {
            key: ShardedTensor.from_rank_offsets(
                key, torch.empty(stored.shape, dtype=stored.dtype), replica_id=torch.distributed.get_rank()
            )
            for key, stored in reader.tensors.items()
        }
        for key, found in dist_checkpointing.load(dict(asked), mcore).items():
            whole = [(0, size) for size in found.shape]
            assert found.isfinite().all() and torch.equal(found, reader.read(key, whole)), key
        metadata = {"singleton_local_shards": False, "non_homogeneous_layers": True}
        for chunk in engine.model.chunks:
            expected = {name: t.clone() for name, t in chunk.state_dict().items() if isinstance(t, torch.Tensor)}
            wanted = chunk.sharded_state_dict(metadata=dict(metadata))
            for parameter in chunk.parameters():
                parameter.data.zero_()
            chunk.load_state_dict(dist_checkpointing.load(wanted, mcore), strict=True)
            now = chunk.state_dict()
            assert all(torch.equal(now[name], t) for name, t in expected.items())
    return len(asked)


def save_where_files_may_not_grow(config: RoleConfig, folder: str, rank: int, longest: int) -> str:
    """What every rank says of a save in which files of one rank get no more than `longest` bytes."""
    engine = engine_with_state(config)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then the write fails, as on a full disk
    if torch.distributed.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (longest, before[1]))
    try:
        engine.save_checkpoint(folder, global_step=1)
        said = "saved"
    except CheckpointError as error:
        said = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    (one,) = set(all_ranks().gather(said))
    assert engine.save_checkpoint(folder, global_step=2), "with room again, the next one is whole"
    return one
