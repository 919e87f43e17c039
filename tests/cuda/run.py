"""One rank of the Megatron engine on fake CUDA tensors: init, mini-batch, optimizer step; nothing of mrl is replaced.

What is given, because nobody else runs and nothing has a value: the shapes that pipeline stages tell each other, and how
many tokens each expert gets (as even as can be).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from tests.cuda import fake, models  # before mrl: fake.py says what torch is here

from mrl.engine.megatron.meta_run import EvenExperts  # isort: skip
from tests.cuda.cases import Case, Result


class _Given(fake.Given):
    """Experts get tokens as evenly as can be, the same numbers on every rank."""

    def __init__(self, case: Case) -> None:
        self.micro_batches = case.micro_batches  # of every rank
        self.lengths = case.lengths * case.micro_batches
        self.shape: tuple[int, ...] = ()  # of what pipeline stages send each other
        self.experts = EvenExperts(_with_numbers, fake.waits)

    def selected(self, mask: Any) -> int:
        count = self.experts.selected(mask)
        return super().selected(mask) if count is None else count

    def told(self, function: str) -> Any:
        if function == "broadcast_from_last_stage":
            return {"loss": 1.0}, [("log_probs", (sum(self.lengths),), torch.float32)]
        return super().told(function)

    def number(self, tensor: Any, function: str) -> Any:
        if function == "on_any_rank":  # none refuses a capture
            return 0
        return self.micro_batches if function == "most" else super().number(tensor, function)

    def numbers(self, tensor: Any, function: str) -> Any:
        if function == "_communicate_shapes":
            return list(self.shape)
        if function == "to_batch_order":
            return [0, *itertools.accumulate(self.lengths)]
        of_experts = self.experts.numbers(tensor, function)
        return super().numbers(tensor, function) if of_experts is None else of_experts


def _with_numbers(values: Any) -> torch.Tensor:
    with unset_fake_temporarily():
        return torch.tensor(values)


def run(case: Case) -> Result:
    """Builds the engine and makes one update."""
    from mrl.engine.megatron import inputs
    from mrl.mcore_models import fp8, userbuffers
    from tests.cuda import update

    batch, given = update.batch_of(case), _Given(case)
    with on_one_rank(case, given) as (folder, watched):

        def built(dims: Any, hidden: int) -> None:
            multiple = fp8.multiple_of(case.megatron)
            lengths, places = list(case.lengths), userbuffers.places_of(update.config_of(case, folder).engine, dims)
            padded = inputs.padded_lengths(lengths, dims, packed=True, multiple=multiple, places=places)
            rows = sum(padded) // dims.cp
            given.shape = (rows // (case.tp if dims.sp else 1), 1, hidden)

        result = update.make(case, folder, batch, watched.memory, watched.syncs, built)
        order = watched.order
        return dataclasses.replace(
            result, unordered=order.found, of_te=order.of_te, replays=watched.replays, operators=dict(order.calls)
        )


def waiting(case: Case) -> tuple[list[str], int]:
    """Makes an update whose layers are captured whatever they are. Returns what is said, and how often graphs were replayed."""
    from mrl.mcore_models import graph_limits, train_graphs

    said: list[str] = []
    with (
        mock.patch.object(graph_limits, "check_layers", lambda *_, **__: None),
        mock.patch.object(train_graphs.logger, "warning", lambda text, *of: said.append(text % of)),
    ):
        replays = run(case).replays
    assert torch.cuda.current_stream() is torch.cuda.default_stream(), "a refused capture leaves its stream"
    return said, replays


@contextlib.contextmanager
def on_one_rank(case: Case, given: _Given) -> Iterator[tuple[Path, fake.Fake]]:
    """This process is one rank of the case's world, on fake CUDA tensors inside. Yields the model's folder, and what is
    watched."""
    fake.join_world(case.rank, case.world)
    from mrl.batch import Batch
    from mrl.engine.lora import identity
    from mrl.engine.megatron import inputs

    folder = models.write(case.model, Path(tempfile.mkdtemp()), case.layers, **case.changes)
    if case.lora:
        models.write_zeros(folder)
    given.experts.install()
    inputs.prepare = made_on_the_device(inputs.prepare)
    Batch.select, identity.fingerprint = on_real_tensors(Batch.select), on_real_tensors(identity.fingerprint)
    with fake.Fake(given) as watched:
        yield folder, watched


def made_on_the_device(prepare: Any) -> Any:
    """An engine's `prepare`, which looks into tokens: it has real ones, and what it moves to the device is fake there."""

    def prepared(batch: Any, *args: Any, device: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            made = prepare(batch, *args, device=torch.device("meta"), **kwargs)
        return _moved(made, lambda t: torch.empty(t.shape, dtype=t.dtype, device=device if t.is_meta else t.device))

    return prepared


def on_real_tensors(function: Any) -> Any:
    """What looks into the numbers of a batch or a file gets them."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


def _moved(made: Any, move: Any) -> Any:
    """A dataclass with every tensor in it moved."""
    found = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
    changes: dict[int, Any] = {}  # one tensor in several fields stays one
    for value in found.values():
        if isinstance(value, torch.Tensor) and id(value) not in changes:
            changes[id(value)] = move(value)
        elif dataclasses.is_dataclass(value):
            changes[id(value)] = _moved(value, move)
        elif isinstance(value, tuple) and all(map(dataclasses.is_dataclass, value)):
            changes[id(value)] = tuple(_moved(part, move) for part in value)
    return dataclasses.replace(made, **{name: changes[id(v)] for name, v in found.items() if id(v) in changes})


def time_stage(case: Case) -> Any:
    """Times a rank as `mrl plan --calibrate` does on a GPU. Returns what it says, and the host's waits."""
    from mrl.config.checks import parallel_dims
    from mrl.engine.megatron import chunk_run, inputs, stage_times
    from mrl.weights.random_weights import RandomWeights
    from tests.cuda import update

    config = update.config_of(case, models.write(case.model, Path(tempfile.mkdtemp()), case.layers, **case.changes))
    inputs.prepare = made_on_the_device(inputs.prepare)
    chunk_run.make_batch = on_real_tensors(chunk_run.make_batch)
    # no generator of a GPU can be made here
    stage_times.RandomWeights = lambda shapes, seed, std, device: RandomWeights(shapes, seed=seed, std=std)
    dims = parallel_dims(config.engine.parallel, case.world)
    with fake.Fake(_Given(case)) as watched:
        return stage_times.time_stage(config, dims, case.rank, case.lengths, "none"), watched.syncs
