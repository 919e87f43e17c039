"""A Megatron engine's state in a checkpoint folder, through megatron's dist_checkpointing.

    mcore/              model and optimizer, sharded by name and place in the whole tensor: any layout and either
                        layer spec loads it; with adapters these alone, under the names of peft's files
    engine.pt           step of the LR schedule, layout, architecture, and the caller's state
    rng/rank_00000.pt   each rank's RNG states; used where layout and type of device are the same, else
                        generators are seeded anew

Who makes the folder, whole or not at all, is `mrl.engine.saving`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async

from mrl.converters.mcore_weights import architecture
from mrl.engine import collective
from mrl.engine.load_errors import LOAD_ERRORS, cannot_load
from mrl.engine.lora.identity import check_identity
from mrl.engine.megatron import checkpoint_names, lora, optim_state
from mrl.engine.megatron.model import Model
from mrl.errors import CheckpointError


def save(model: Model, path: str, *, schedule_step: int, state: Mapping[str, Any]) -> None:
    """Writes this rank's part into the folder `path`. Collective."""
    rank, described = dist.get_rank(), _description(model)
    if rank == 0:
        os.makedirs(os.path.join(path, "mcore"))
        os.makedirs(os.path.join(path, "rng"))
        about = {"schedule_step": schedule_step} | described | {"state": dict(state)}
        torch.save(about, os.path.join(path, "engine.pt"))
    collective.wait_for_all()
    torch.save(_plain_rng(model), os.path.join(path, "rng", f"rank_{rank:05d}.pt"))
    with _quiet(), _writing_in_process():
        dist_checkpointing.save(_sharded(model, loading=False), os.path.join(path, "mcore"))


def load(model: Model, found: str) -> tuple[int, dict[str, Any]]:
    """Restores what `save` wrote into the folder `found`. Returns (schedule step, the caller's state). Collective."""
    rank = dist.get_rank()
    saved = _read(os.path.join(found, "engine.pt"), found)
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
    sharded = _sharded(model, loading=True)
    try:
        with _quiet():
            loaded = dist_checkpointing.load(sharded, os.path.join(found, "mcore"))
    except (CheckpointingException, *LOAD_ERRORS) as error:
        raise cannot_load(found, error) from error
    for index, chunk in enumerate(model.chunks):
        if model.adapters:
            lora.restore(chunk, loaded[f"model{index}"])
        else:
            checkpoint_names.check_loaded(*chunk.load_state_dict(loaded[f"model{index}"], strict=False))
    if model.optimizer is not None:
        optim_state.restore(model.optimizer, loaded["optimizer"], saved["optimizer_steps"])
    if saved["layout"] == dataclasses.asdict(model.dims):
        _restore_rng(model, _read(os.path.join(found, "rng", f"rank_{rank:05d}.pt"), found))
    return saved["schedule_step"], saved["state"]


def check_architecture(saved: Mapping[str, Any], own: Mapping[str, Any], path: str) -> None:
    """Refuses a checkpoint of another model, naming what differs. An older mrl knew a model by fewer fields."""
    differ = [f"{k} {saved.get(k)!r} there and {own.get(k)!r} here" for k in sorted(saved) if saved[k] != own.get(k)]
    if differ:
        raise CheckpointError(
            path, why=f"is of another model: {'; '.join(differ)}", fix="resume with the model it was made from"
        )


def _architecture(model: Model) -> dict[str, Any]:
    return architecture(model.family, model.hf) | {
        "head": model.config.head,
        "dtype": model.config.model.dtype,
        "layer_spec": "local",  # whose names the tensors have (checkpoint_names), not the one that computes
    }


def _description(model: Model) -> dict[str, Any]:
    """Returns what every rank saves. Collective: a pipeline stage without adapters has made no update of its own."""
    steps = (
        None
        if model.optimizer is None
        else int(collective.max_over_ranks(model.device, optim_state.step_count(model.optimizer))[0])
    )
    return {
        "layout": dataclasses.asdict(model.dims),
        "architecture": _architecture(model),
        "adapters": model.adapter_identity,
        "optimizer_steps": steps,
    }


def _plain_rng(model: Model) -> dict[str, Any]:
    tracker, host, device = model.state.rng_state()
    tracker = {name: state.clone() for name, state in tracker.items()}
    return {"device_type": model.device.type, "tracker": tracker, "host": host, "device": device}


def _restore_rng(model: Model, saved: Mapping[str, Any]) -> None:
    """Another type of device cannot go on bitwise, nor read the other's states: its generators stay as seeded."""
    if saved["device_type"] == model.device.type:
        model.state.set_rng_state((saved["tracker"], saved["host"], saved["device"]))
    else:
        torch.set_rng_state(saved["host"])


def _sharded(model: Model, *, loading: bool) -> dict[str, Any]:
    """megatron's sharded state dict. Optimizer state is keyed like the parameters, so tp, pp, ep and dp may change."""
    metadata = {
        "singleton_local_shards": False,
        "non_homogeneous_layers": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    result: dict[str, Any] = {}
    if model.adapters:
        result |= lora.sharded(model.chunks, model.rules)
    else:
        for index, chunk in enumerate(model.chunks):
            result[f"model{index}"] = checkpoint_names.stored(chunk.sharded_state_dict(metadata=metadata))
    if model.optimizer is not None:
        result["optimizer"] = optim_state.sharded(model.optimizer, result, loading=loading)
    return result


def _read(path: str, found: str) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch has no common class for what a file can have wrong
        raise CheckpointError(
            found, why=f"{os.path.basename(path)} cannot be read ({error})", fix="use another checkpoint"
        ) from error


@contextlib.contextmanager
def _writing_in_process() -> Iterator[None]:
    """megatron hands what each rank writes to child processes, and starts another one for a queue between them.

    Ours is a save that the run waits for: it writes in this process, so that a run that is killed stops writing, and a
    program needs no `if __name__ == "__main__"` for the sake of a child that imports it again.
    """
    writer = filesystem_async.FileSystemWriterAsync
    name = "write_preloaded_data_multiproc"
    original = writer.__dict__.get(name)  # 0.19 has threads instead
    filesystem_async._results_queue = queue.Queue()
    if original is not None:
        setattr(writer, name, staticmethod(_write_here))
    try:
        yield
    finally:
        filesystem_async._results_queue = None
        if original is not None:
            setattr(writer, name, original)


def _write_here(transforms: list, use_msc: bool, rank: int, buckets: Sequence, results: queue.Queue) -> None:
    """Writes this rank's files one after the other and reports as megatron's child processes would."""
    written: dict[int, Any] = {}
    for index, bucket in enumerate(buckets):
        done: queue.Queue[Any] = queue.Queue()
        counter: queue.Queue[int] = queue.Queue()
        counter.put(index)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, done, counter, True)
        _, result = done.get_nowait()
        if isinstance(result, Exception):
            results.put(result)
            return
        written[index] = result
    results.put(written)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps from the user what megatron warns of its own use of torch, and logs at every save."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
