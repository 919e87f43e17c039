"""Checkpoints of the FSDP engine, in the format of torch.distributed.checkpoint.

torch writes it. mrl/engine/torch_dist reads it, because torch's own reader runs the code that the pickle `.metadata`
names.

The sharded tensors (`model.NAME`, `exp_avg.NAME`, `exp_avg_sq.NAME`) are saved with their place in the whole, so any
number of ranks reads them. A model with adapters saves those alone, under the names of peft's files. Two more kinds of
file: `state.pt` (steps, the caller's state) and `rng_RANK.pt` of every rank.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from mrl.engine import background, collective
from mrl.engine.atomic_checkpoint import RankGroup
from mrl.engine.fsdp.model import Model
from mrl.engine.fsdp.names import STATE
from mrl.engine.fsdp.optim import Optimizer
from mrl.engine.lora.identity import check_identity
from mrl.engine.rng import Generators
from mrl.engine.torch_dist.boxes import Box, fill
from mrl.engine.torch_dist.data_files import saved_bytes
from mrl.engine.torch_dist.reader import TorchDistReader
from mrl.errors import CheckpointError
from mrl.weights.fields import NEUTRAL
from mrl.weights.mcore_weights import architecture, check_architecture, differing_fields
from mrl.weights.pt_file import load_pt

_FIELDS = ("schedule_step", "updates", "state")
"""What `state.pt` has, whichever mrl wrote it."""


def tensors(model: Model, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """Returns everything sharded, by its name in the checkpoint, as the tensors in use: reading into them restores."""
    kept = model.trained() if model.adapters is not None else model.parameters() | model.buffers()
    named: dict[str, Tensor] = {f"model.{name}": tensor.detach() for name, tensor in kept.items()}
    return named | (optimizer.moments() if optimizer is not None else {})


def save(folder: str, model: Model, optimizer: Optimizer | None, files: tuple[bytes, bytes]) -> None:
    """Writes this rank's part into `folder`. files: `small_files`. Collective."""
    dcp.save(tensors(model, optimizer), checkpoint_id=folder)
    _write_small_files(folder, dist.get_rank(), *files)


def stage(model: Model, optimizer: Optimizer | None, files: tuple[bytes, bytes]) -> background.Write:
    """Copies the tensors of `save` to host memory. Returns a function that writes what `save` does."""
    copies = {name: _on_host(tensor) for name, tensor in tensors(model, optimizer).items()}
    background.wait_for_copies(model.device)

    def write_copy(folder: str, ranks: RankGroup) -> None:
        ranks.gather(None)  # a rank that failed before this says so here, not amid the collectives of dcp
        dcp.save(copies, checkpoint_id=folder, process_group=ranks.group)
        _write_small_files(folder, ranks.rank, *files)
        ranks.gather(None)

    return write_copy


def _write_small_files(folder: str, rank: int, rng: bytes, about: bytes) -> None:
    """Writes the files beside the sharded tensors."""
    pathlib.Path(folder, f"rng_{rank}.pt").write_bytes(rng)
    if rank == 0:
        pathlib.Path(folder, STATE).write_bytes(about)


def _on_host(tensor: Tensor) -> Tensor:
    # `DTensor.from_local` (torch 2.13, distributed/tensor/_api.py) would move the copy back to the mesh's device
    if isinstance(tensor, DTensor):
        return DTensor(background.copy_to_host(tensor.to_local()), tensor._spec, requires_grad=False)
    return background.copy_to_host(tensor)


def small_files(
    model: Model, optimizer: Optimizer | None, generators: Generators, schedule_step: int, state: Mapping[str, Any]
) -> tuple[bytes, bytes]:
    """Returns the content of this rank's `rng_RANK.pt`, and of `state.pt`."""
    about = {
        "schedule_step": schedule_step, "updates": 0 if optimizer is None else optimizer.updates, "state": dict(state),
        "architecture": describe_model(model), "adapters": model.adapter_identity,
    }  # fmt: skip
    return saved_bytes(generators.states()), saved_bytes(about)


def load(
    folder: str, model: Model, optimizer: Optimizer | None, *, generators: Generators
) -> tuple[int, dict[str, Any]]:
    """Restores what `save` wrote, on any number of ranks. Returns (schedule step, the caller's state). Collective.

    Nothing is changed unless every tensor is there in the right shape. RNG states are restored on the ranks that had
    one; a new rank keeps its own.
    """
    saved = load_pt(os.path.join(folder, STATE), fields=_FIELDS)
    if model.adapter_identity is not None or saved.get("adapters") is not None:
        _check_architecture(saved["architecture"], model, folder)
        check_identity(saved.get("adapters"), model.adapter_identity, folder)
    rng = os.path.join(folder, f"rng_{dist.get_rank()}.pt")
    generator_states = collective.call_on_every_rank(lambda: load_pt(rng) if os.path.exists(rng) else None)
    collective.call_on_every_rank(lambda: _read_tensors(folder, model, optimizer, saved))
    if optimizer is not None:
        optimizer.updates = saved["updates"]
    if generator_states is not None:
        generators.restore(generator_states)
    return saved["schedule_step"], saved["state"]


def state_of(folder: str) -> dict[str, Any] | None:
    """Returns the caller's state alone, on one rank; None if it cannot be read. `load` says why."""
    try:
        return load_pt(os.path.join(folder, STATE), fields=_FIELDS)["state"]
    except CheckpointError:
        return None


def describe_model(model: Model) -> dict[str, Any]:
    """Returns the fields of config.json that identify a model: its family's, or all but the neutral ones."""
    if model.family is not None:
        return architecture(model.family, model.hf_config)
    plain = (str, int, float, bool, type(None), list, dict)
    known = {k: v for k, v in model.hf_config.items() if k not in NEUTRAL and k[0] != "_" and isinstance(v, plain)}
    return {"model_type": model.hf_config["model_type"], **known}


def _check_architecture(saved: Mapping[str, Any], model: Model, folder: str) -> None:
    if model.family is not None:
        check_architecture(saved, model.family, model.hf_config, folder)
    elif differ := differing_fields(saved, describe_model(model), "in the checkpoint", "in config.json"):
        raise CheckpointError(
            folder, why=f"is another model: {'; '.join(differ)}", fix="give the model that was trained"
        )


@torch.no_grad()
def _read_tensors(folder: str, model: Model, optimizer: Optimizer | None, about: Mapping[str, Any]) -> None:
    """Fills this rank's shards. about: what is in `state.pt`."""
    wanted = tensors(model, optimizer)
    reader = TorchDistReader(folder)
    _check_fit(folder, reader, wanted)
    _check_architecture(about["architecture"], model, folder)
    fill(reader, [_box(name, tensor) for name, tensor in wanted.items()])


def _box(name: str, tensor: Tensor) -> Box:
    """Returns this rank's part of a tensor, as a view of its memory."""
    whole = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Box(name, whole, (0,) * len(whole), tensor)
    local = tensor.to_local()
    shape, offsets = compute_local_shape_and_global_offset(whole, tensor.device_mesh, tensor.placements)
    assert tuple(shape) == tuple(local.shape), f"{name}: {shape} of {whole}, and in memory {tuple(local.shape)}"
    return Box(name, whole, tuple(offsets), local)


def _check_fit(folder: str, reader: TorchDistReader, wanted: Mapping[str, Tensor]) -> None:
    """Refuses the checkpoint of another model, naming tensors."""
    saved = reader.tensors
    lacking = [name for name in wanted if name not in saved]
    if lacking and not any(name.startswith("model.") for name in lacking):
        raise CheckpointError(
            folder, why="was saved without an optimizer", fix="resume with the role that it was saved by"
        )
    there = {name: tuple(tensor.shape) for name, tensor in saved.items() if name.startswith("model.") or name in wanted}
    here = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    differ = sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))
    if differ:
        name = differ[0]
        raise CheckpointError(
            folder,
            why=f"is of another model: {name} is {there.get(name)} there and {here.get(name)} here "
            f"({len(differ)} tensors differ)",
            fix="resume with the model it was made from",
        )
