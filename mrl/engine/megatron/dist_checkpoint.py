"""Saves and loads a Megatron engine's state in a checkpoint folder, in the format of megatron's dist_checkpointing.

    mcore/              model and optimizer, sharded by name and place in the whole tensor: any layout and either
                        layer spec loads it; with adapters these alone, under the names of peft's files
                        (torch_dist/boxes.py writes and reads it: megatron's own writer has all of it on the host first)
    engine.pt           step of the LR schedule, layout, architecture, and the caller's state
    rng/rank_00000.pt   each rank's RNG states; used where layout and type of device are the same, else
                        generators are seeded again

Parameters have the names of the local layer spec, whatever spec the model is built with. transformer-engine's modules
fuse a norm with the next linear, and its experts are one module. megatron's sharded state dict gives experts the same
names under both specs; norms within a linear are renamed here. So a checkpoint of one spec resumes under the other, and
`mrl convert` reads it without knowing the spec.

`mrl.engine.saving` makes the folder, whole or not at all.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor, ShardedTensorFactory

from mrl.engine import background, collective
from mrl.engine.atomic_checkpoint import RankGroup
from mrl.engine.lora.identity import check_identity
from mrl.engine.megatron import groups, lora, optim_state, weights
from mrl.engine.megatron.model import Model
from mrl.engine.megatron.optim import optimizers_of
from mrl.engine.torch_dist.boxes import Box, PlacedTensor, WrittenFile, check, fill, write, write_index
from mrl.engine.torch_dist.data_files import saved_bytes
from mrl.engine.torch_dist.reader import TorchDistReader
from mrl.errors import CheckpointError
from mrl.weights.families import FAMILIES
from mrl.weights.mcore_weights import architecture
from mrl.weights.pt_file import load_pt
from mrl.weights.table import as_mtp_entry

T = TypeVar("T")

_FIELDS = ("schedule_step", "layout", "architecture", "optimizer_steps", "state")
"""Fields of `engine.pt` from any version of mrl."""


def save(model: Model, path: str, *, schedule_step: int, state: Mapping[str, Any]) -> None:
    """Writes this rank's part into the folder `path`. Collective."""
    about, rng = _small_files(model, schedule_step, state)

    def on_every_rank(fn: Callable[[], WrittenFile]) -> Sequence[WrittenFile]:
        return collective.gather_on_main(collective.call_on_every_rank(fn))

    _write_files(path, about, rng, _boxes_to_write(model), collective.on_main, on_every_rank)


def stage(model: Model, *, schedule_step: int, state: Mapping[str, Any]) -> background.Write:
    """Copies the state of `save` to host memory. Returns a function that writes the same files. Collective."""
    about, rng = _small_files(model, schedule_step, state)
    boxes = [dataclasses.replace(b, data=background.copy_to_host(b.data)) for b in _boxes_to_write(model)]
    background.wait_for_copies(model.device)

    def write_copy(path: str, ranks: RankGroup) -> None:
        def on_main(fn: Callable[[], None]) -> None:
            if ranks.rank == 0:
                fn()
            ranks.gather(None)

        _write_files(path, about, rng, boxes, on_main, lambda fn: ranks.gather(fn()))

    return write_copy


def _small_files(model: Model, schedule_step: int, state: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """Returns the content of `engine.pt`, and of this rank's RNG states.

    Collective, because a pipeline stage without adapters has no count of updates of its own.
    """
    steps = None
    if model.optimizer is not None:
        steps = int(collective.max_over_ranks(model.device, optim_state.step_count(model.optimizer))[0])
    about = {
        "schedule_step": schedule_step,
        "layout": dataclasses.asdict(model.dims),
        "architecture": _architecture(model),
        "adapters": model.adapter_identity,
        "optimizer_steps": steps,
        "state": dict(state),
    }
    tracker, host, device = groups.rng_state()
    rng = {
        "device_type": model.device.type,
        "tracker": {name: of_stream.clone() for name, of_stream in tracker.items()},
        "host": host,
        "device": device,
    }
    return saved_bytes(about), saved_bytes(rng)


def _boxes_to_write(model: Model) -> Iterator[Box]:
    placed = _placed(model)
    yield from (box for each in placed if not any(each.replica) for box in each.boxes)
    if model.optimizer is not None:
        yield from optim_state.boxes(model.optimizer, placed, to_read=False)


def _write_files(
    path: str, about: bytes, rng: bytes, boxes: Iterable[Box], on_main: Callable[[Callable[[], None]], None],
    on_every_rank: Callable[[Callable[[], WrittenFile]], Sequence[WrittenFile]],
) -> None:  # fmt: skip
    """Writes the checkpoint's files. on_main: calls a function on the main process while the others wait."""
    folder, rank = Path(path), dist.get_rank()

    def common() -> None:
        (folder / "mcore").mkdir(parents=True)
        (folder / "rng").mkdir()
        (folder / "engine.pt").write_bytes(about)

    def own() -> WrittenFile:
        (folder / "rng" / f"rank_{rank:05d}.pt").write_bytes(rng)
        return write(folder / "mcore" / f"__{rank}_0.distcp", boxes)

    on_main(lambda: _writing(path, common))
    everyone = on_every_rank(lambda: _writing(path, own))
    on_main(lambda: _writing(path, lambda: write_index(folder / "mcore", everyone)))


def _writing(path: str, fn: Callable[[], T]) -> T:
    """Calls `fn`, which writes into `path`. Raises CheckpointError if the disk refuses it."""
    try:
        return fn()
    except OSError as error:
        why = f"cannot be written ({error.strerror or error})"
        raise CheckpointError(path, why=why, fix="give it room, and run the same command again") from error


def load(model: Model, found: str) -> tuple[int, dict[str, Any]]:
    """Restores the state that `save` wrote into the folder `found`. Returns (schedule step, the caller's state).
    Collective."""
    rank = dist.get_rank()
    saved = load_pt(os.path.join(found, "engine.pt"), fields=_FIELDS)
    check_architecture(saved["architecture"], _architecture(model), found)
    check_identity(saved.get("adapters"), model.adapter_identity, found)
    if model.optimizer is not None and not saved["layout"]:
        raise CheckpointError(
            found,
            why="holds weights alone, as `mrl convert import` makes it",
            fix="name it in model.path to start from it",
        )
    if model.optimizer is not None and saved["optimizer_steps"] is None:
        raise CheckpointError(
            found, why="was saved without an optimizer", fix="resume with the role that it was saved by"
        )
    of_rank = os.path.join(found, "rng", f"rank_{rank:05d}.pt")
    same_layout = saved["layout"] == dataclasses.asdict(model.dims)
    rng = collective.call_on_every_rank(lambda: load_pt(of_rank)) if same_layout else None
    collective.call_on_every_rank(lambda: _read_tensors(model, found))
    if model.optimizer is not None:
        for part in optimizers_of(model.optimizer):
            optim_state.set_step_count(part.optimizer, saved["optimizer_steps"])
    if rng is not None and rng["device_type"] == model.device.type:
        groups.set_rng_state((rng["tracker"], rng["host"], rng["device"]))
    elif rng is not None:  # another type of device cannot read the other's states
        torch.set_rng_state(rng["host"])
    return saved["schedule_step"], saved["state"]


def state_of(found: str) -> dict[str, Any] | None:
    """Returns the caller's state alone, on one rank; None if it cannot be read. `load` gives the reason."""
    try:
        return load_pt(os.path.join(found, "engine.pt"), fields=_FIELDS)["state"]
    except CheckpointError:
        return None


def _read_tensors(model: Model, found: str) -> None:
    """Fills this rank's tensors, one block after the other. Nothing is changed unless all of them are there."""
    try:
        reader = TorchDistReader(os.path.join(found, "mcore"))
        placed = _placed(model)
        boxes = [box for each in placed for box in each.boxes]
        if model.optimizer is not None:
            boxes += optim_state.boxes(model.optimizer, placed, to_read=True)
        check(reader, boxes)
        fill(reader, boxes)
    except CheckpointError as error:
        where = os.path.basename(error.key or "")
        raise CheckpointError(
            found, why=f"cannot be loaded ({where} {error.why})", fix="use another checkpoint"
        ) from error


def check_architecture(saved: Mapping[str, Any], own: Mapping[str, Any], path: str) -> None:
    """Refuses a checkpoint of another model, and names the differences. An older mrl wrote fewer fields."""
    differ = [f"{k} {saved.get(k)!r} there and {own.get(k)!r} here" for k in sorted(saved) if saved[k] != own.get(k)]
    if differ:
        raise CheckpointError(
            path, why=f"is of another model: {'; '.join(differ)}", fix="resume with the model it was made from"
        )


def _architecture(model: Model) -> dict[str, Any]:
    return architecture(model.family, model.hf) | {
        "head": model.config.head,
        "dtype": model.config.model.dtype,
        "layer_spec": "local",  # of the tensors' names (`stored_name`), not of the computation
    }


def _sharded(model: Model) -> dict[str, Any]:
    """Returns megatron's sharded state dict of the model."""
    # Without non_homogeneous_layers megatron stacks the layers of a model into one tensor (0.16.1 and 0.19.2,
    # transformer_block.sharded_state_dict), and names would depend on moe_layer_freq. singleton_local_shards would
    # write gate and up as two tensors (mlp.apply_swiglu_sharded_factory).
    metadata = {
        "singleton_local_shards": False,
        "non_homogeneous_layers": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    whole = (stored_names(chunk.sharded_state_dict(metadata=metadata)) for chunk in model.chunks)
    return {f"model{index}": of_chunk for index, of_chunk in enumerate(whole)}


def _placed(model: Model) -> list[PlacedTensor]:
    """Returns the model's tensors with their places in a checkpoint."""
    if model.adapters:
        return list(lora.checkpoint_places(model.chunks, model.rules))
    placed = []
    for entry in nested_values(_sharded(model)):
        assert isinstance(entry, ShardedTensor | ShardedTensorFactory) and entry.data is not None, entry
        entries = nested_values([entry.build() if isinstance(entry, ShardedTensorFactory) else entry])
        placed.append(PlacedTensor(entry.data, tuple(map(_box, entries)), _replica(entry)))
    held = {id(t): name for c in model.chunks for name, t in weights.tensors_of(c).items()}
    lost = sorted(held[i] for i in held.keys() ^ {id(each.tensor) for each in placed})
    assert not lost, f"megatron has no place in a checkpoint for {lost}"
    return placed


def _box(entry: ShardedTensor) -> Box:
    assert entry.flattened_range is None, entry
    data = entry.data.detach()
    # megatron prepends the axis of experts to global_shape (ShardedTensor.prepend_axis_num), not to the data
    data = data[(None,) * (len(entry.global_shape) - data.dim())]
    return Box(entry.key, tuple(entry.global_shape), tuple(entry.global_offset), data, entry.allow_shape_mismatch)


def _replica(entry: ShardedBase) -> tuple[int, ...]:
    return (entry.replica_id,) if isinstance(entry.replica_id, int) else tuple(entry.replica_id)


_EXTRA = "_extra_state"  # transformer-engine's scales of FP8; a checkpoint without them loads under either spec


@functools.cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    """Returns (name under transformer-engine, stored name) of all families; `l` is the layer."""
    patterns = {}
    for family in FAMILIES.values():
        of_layer = (*family.layer, *family.linear, *family.dense, *family.sparse)
        for entry in (*of_layer, *map(as_mtp_entry, of_layer)):
            if entry.te is not None and not entry.of_expert:
                pattern = re.escape(entry.te).replace(re.escape("{l}"), r"(?P<l>\d+)")
                patterns[pattern] = entry.mcore.replace("{l}", r"\g<l>")
    return [(re.compile(pattern), name) for pattern, name in patterns.items()]


def stored_name(key: str) -> str:
    """Returns the name in a checkpoint for `key`, a name under either spec."""
    for pattern, name in _patterns():
        if match := pattern.fullmatch(key):
            return match.expand(name)
    return key


def stored_names(sharded: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a chunk's sharded state dict with entries of these names, and without transformer-engine's own state.

    sharded: name in the module -> megatron's ShardedTensor, ShardedTensorFactory or ShardedObject, which are changed.
    """
    kept = {name: entry for name, entry in sharded.items() if _EXTRA not in name}
    for entry in kept.values():
        entry.key = stored_name(entry.key)
    return kept
