"""A Megatron engine's state in a checkpoint folder, through megatron's dist_checkpointing.

    mcore/              model and optimizer, sharded by name and place in the whole tensor: any layout loads it; with
                        adapters these alone, under the names of peft's files
    engine.pt           step of the LR schedule, layout, architecture, and the caller's state
    rng/rank_00000.pt   each rank's RNG states; used when layout and type of device are the same, else generators are seeded anew

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
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async

from mrl.converters.mcore_weights import architecture
from mrl.engine import collective
from mrl.engine.load_errors import LOAD_ERRORS, cannot_load
from mrl.engine.lora.identity import check_facts
from mrl.engine.megatron import lora, optim_state
from mrl.errors import CheckpointError

if TYPE_CHECKING:
    from mrl.engine.megatron.engine import MegatronEngine


def save(engine: "MegatronEngine", path: str, state: Mapping[str, Any]) -> None:
    """Writes this rank's part into the folder `path`. Collective."""
    rank, described = dist.get_rank(), _description(engine)
    if rank == 0:
        os.makedirs(os.path.join(path, "mcore"))
        os.makedirs(os.path.join(path, "rng"))
        torch.save(described | {"state": dict(state)}, os.path.join(path, "engine.pt"))
    collective.wait_for_all()
    torch.save(_plain_rng(engine), os.path.join(path, "rng", f"rank_{rank:05d}.pt"))
    with _quiet(), _writing_in_process():
        dist_checkpointing.save(_sharded(engine, loading=False), os.path.join(path, "mcore"))


def load(engine: "MegatronEngine", found: str) -> dict[str, Any]:
    """Restores what `save` wrote into the folder `found`. Returns the caller's state. Collective."""
    rank = dist.get_rank()
    saved = _read(os.path.join(found, "engine.pt"), found)
    check_architecture(saved["architecture"], _architecture(engine), found)
    check_facts(saved.get("adapters"), engine.adapter_facts, found)
    if engine.optimizer is not None and not saved["layout"]:
        raise CheckpointError(
            f"{found}: holds weights alone, as `mrl convert import` makes it; name it in model.path to start from it"
        )
    if engine.optimizer is not None and saved["optimizer_steps"] is None:
        raise CheckpointError(f"{found}: was saved without an optimizer; resume with the role that it was saved by")
    sharded = _sharded(engine, loading=True)
    try:
        with _quiet():
            loaded = dist_checkpointing.load(sharded, os.path.join(found, "mcore"))
    except (CheckpointingException, *LOAD_ERRORS) as error:
        raise cannot_load(found, error) from error
    for index, chunk in enumerate(engine.models):
        if engine.adapters:
            lora.restore(chunk, loaded[f"model{index}"])
        else:
            chunk.load_state_dict(loaded[f"model{index}"], strict=True)
    if engine.optimizer is not None:
        optim_state.restore(engine.optimizer, loaded["optimizer"], saved["optimizer_steps"])
    engine.schedule_step = saved["schedule_step"]
    if saved["layout"] == dataclasses.asdict(engine.dims):
        _restore_rng(engine, _read(os.path.join(found, "rng", f"rank_{rank:05d}.pt"), found))
    return saved["state"]


def check_architecture(saved: Mapping[str, Any], own: Mapping[str, Any], path: str) -> None:
    """Refuses a checkpoint of another model, naming what differs. An older mrl told a model by fewer fields."""
    if saved.get("layer_spec") != own.get("layer_spec"):
        raise CheckpointError(
            f"{path}: was saved with the {saved.get('layer_spec')} layer spec, whose tensors have other names than those of the "
            f"{own.get('layer_spec')} one, which is used here (te where transformer-engine and a GPU are there); resume where it "
            "was saved, or export it and start from that"
        )
    differ = [f"{k} {saved.get(k)!r} there and {own.get(k)!r} here" for k in sorted(saved) if saved[k] != own.get(k)]
    if differ:
        raise CheckpointError(
            f"{path}: is of another model: {'; '.join(differ)}; resume with the model it was made from"
        )


def _architecture(engine: "MegatronEngine") -> dict[str, Any]:
    return architecture(engine.family, engine.hf) | {
        "head": engine.config.head,
        "dtype": engine.config.model.dtype,
        "layer_spec": engine.spec,
    }


def _description(engine: "MegatronEngine") -> dict[str, Any]:
    """The same on every rank. Collective: a pipeline stage without adapters has made no update of its own."""
    steps = (
        None if engine.optimizer is None else int(engine.max_over_ranks(optim_state.step_count(engine.optimizer))[0])
    )
    return {
        "schedule_step": engine.schedule_step,
        "layout": dataclasses.asdict(engine.dims),
        "architecture": _architecture(engine),
        "adapters": engine.adapter_facts,
        "optimizer_steps": steps,
    }


def _plain_rng(engine: "MegatronEngine") -> dict[str, Any]:
    tracker, host, device = engine.state.rng_state()
    tracker = {name: state.clone() for name, state in tracker.items()}
    return {"device_type": engine.device.type, "tracker": tracker, "host": host, "device": device}


def _restore_rng(engine: "MegatronEngine", saved: Mapping[str, Any]) -> None:
    """Another type of device cannot go on bitwise, nor read the other's states: its generators stay as seeded."""
    if saved["device_type"] == engine.device.type:
        engine.state.set_rng_state((saved["tracker"], saved["host"], saved["device"]))
    else:
        torch.set_rng_state(saved["host"])


def _sharded(engine: "MegatronEngine", *, loading: bool) -> dict[str, Any]:
    """megatron's sharded state dict. Optimizer state is keyed like the parameters, so tp, pp, ep and dp may change."""
    metadata = {
        "singleton_local_shards": False,
        "non_homogeneous_layers": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    result: dict[str, Any] = {}
    if engine.adapters:
        result |= lora.sharded(engine.models, engine.rules)
    else:
        for index, chunk in enumerate(engine.models):
            result[f"model{index}"] = chunk.sharded_state_dict(metadata=metadata)
    if engine.optimizer is not None:
        result["optimizer"] = optim_state.sharded(engine.optimizer, result, loading=loading)
    return result


def _read(path: str, found: str) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch has no common class for what a file can have wrong
        raise CheckpointError(
            f"{found}: {os.path.basename(path)} cannot be read ({error}); use another checkpoint"
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
        done, counter = queue.Queue(), queue.Queue()
        counter.put(index)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, done, counter, True)
        _, result = done.get_nowait()
        if isinstance(result, Exception):
            results.put(result)
            return
        written[index] = result
    results.put(written)


class _quiet:
    """megatron warns about its own use of torch, and logs at every save; neither is for the user."""

    def __enter__(self) -> None:
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)

    def __exit__(self, *exc: object) -> None:
        logging.disable(logging.NOTSET)
        self._warnings.__exit__(*exc)
