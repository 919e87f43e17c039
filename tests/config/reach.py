"""Runs of the whole SFT trainer on tiny inputs, and what is seen of them: the machinery of test_keys_reach.py.

A run is seen from outside (its directory, what it prints, how it ends) and from inside its processes: the micro-batches
that the loss function is given, the calls of the model's modules, the parameters a rank holds, and what has no memory
between two steps. Nothing is replaced: the loss function is wrapped, modules have a hook, the engine is looked at.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook

from mrl import metrics
from mrl.batch import Batch
from mrl.config.load import from_dict
from mrl.errors import UserError
from mrl.trainers import sft
from mrl.trainers.rows import RowsTrainer
from tests.config.refused import nested
from tests.engine.harness import run_case
from tests.trainers.cases import before_step

DEFAULT = "(left out)"
BACKENDS = ("megatron", "fsdp")
BASE = {
    "output_dir": "{run}/demo", "model.path": "{inputs}/dense", "model.dtype": "float32", "engine.device": "cpu",
    "optimizer.lr": 1e-2, "data.train": "{inputs}/sums.jsonl", "train.steps": 1, "train.global_batch_size": 4,
    "log.console": "plain",
}  # fmt: skip
"""The run that rows change. {inputs} is the folder that inputs.py filled, {run} one that each run has for itself."""

MODULES = {
    "Embedding": "embedding", "FSDPEmbedding": "embedding", "VocabParallelEmbedding": "embedding", "TransformerLayer": "layer",
    "RotarySelfAttention": "layer input", "SdpaAttention": "attention", "Qwen3Attention": "attention", "MLP": "mlp",
    "Qwen3MLP": "mlp",
}  # fmt: skip
"""Class -> what looks call it, for both backends."""


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A run that is to end with an error of class `kind` whose message has `says` in it."""

    kind: str
    says: str


@dataclasses.dataclass(frozen=True)
class Row:
    """A key, and what is seen of a run with each of some values of it.

    seen: pairs of a value, or DEFAULT where the key is left out, and what `look` gives (or a Refusal). given: other
    keys. what: tells rows of one key apart. world: processes. on: backends. after: keys of a run that was there before.
    terminal: it prints to a terminal.
    """

    key: str
    look: Callable[[Run], Any]
    seen: Sequence[tuple[Any, Any]]
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    _: dataclasses.KW_ONLY
    what: str = ""
    world: int = 1
    on: Sequence[str] = BACKENDS
    after: Mapping[str, Any] | None = None
    terminal: bool = False

    def __str__(self) -> str:
        return f"{self.key}{f', {self.what}' if self.what else ''}"


def of_section(section: str, names: str, file: str) -> dict[str, str]:
    """Keys of a section, which a file of tests sees."""
    return {f"{section}.{name}": f"tests/{file}" for name in names.split()}


# --------------------------------------------------------------------------------------------------- inside a process


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """One call of the loss function. ids, mask: of each sequence, not shifted."""

    step: int
    trains: bool
    ids: list[list[int]]
    mask: list[list[float]]

    @classmethod
    def of(cls, data: Batch, step: int) -> MicroBatch:
        split = [t.split(data.lengths.tolist()) for t in (data.tokens, data.labels, data.loss_mask)]
        ids = [[*tokens.tolist(), int(labels[-1])] for tokens, labels, _ in zip(*split, strict=True)]
        return cls(step, torch.is_grad_enabled(), ids, [[0.0, *mask.tolist()] for mask in split[2]])


@dataclasses.dataclass(frozen=True)
class Call:
    """A module's forward in the first step. shape, dtype: of its first tensor. layer: megatron's number, from 1."""

    module: str
    layer: int | None
    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass
class Seen:
    """What one rank saw. held: elements of parameters on this rank. compiled: frames that torch.compile made."""

    steps: int = 0
    micro_batches: list[MicroBatch] = dataclasses.field(default_factory=list)
    calls: list[Call] = dataclasses.field(default_factory=list)
    parameters: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    devices: set[str] = dataclasses.field(default_factory=set)
    held: int = 0
    compiled: int = 0

    def note_call(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        name = MODULES.get(type(module).__name__)
        if name is not None and module.training and self.steps == 1:
            tensor = next((x for x in inputs if isinstance(x, torch.Tensor)), torch.empty(0))
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.calls.append(Call(name, getattr(module, "layer_number", None), tuple(tensor.shape), dtype))

    def note_engine(self, trainer: RowsTrainer) -> None:
        self.steps += 1
        engine = trainer.engine
        models = engine.model.chunks if engine.backend == "megatron" else [engine.model.module]
        held = [(name, p) for model in models for name, p in model.named_parameters()]
        self.parameters = {name: tuple(p.shape) for name, p in held}
        self.held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for _, p in held)
        self.devices = {p.device.type for _, p in held}


@contextlib.contextmanager
def watching(seen: Seen) -> Iterator[None]:
    loss = sft.sft_loss

    def note_engine(trainer: RowsTrainer, _: int) -> None:
        torch._dynamo.utils.counters["frames"].clear()
        seen.note_engine(trainer)

    def noted(data: Batch, predictions: Any, ctx: Any) -> Any:
        if seen.steps:  # else it is the evaluation before training
            seen.micro_batches.append(MicroBatch.of(data, seen.steps))
            seen.compiled = max(seen.compiled, torch._dynamo.utils.counters["frames"]["ok"])
        return loss(data, predictions, ctx)

    hook = register_module_forward_pre_hook(seen.note_call)
    try:
        with mock.patch.object(sft, "sft_loss", noted), before_step(note_engine):
            yield
    finally:
        hook.remove()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def surroundings(environ: Mapping[str, str], code_cache: str) -> Iterator[None]:
    """No account of anybody's, and nothing left behind in the process or at home."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    cache = mock.patch.object(transformers.dynamic_module_utils, "HF_MODULES_CACHE", code_cache)
    with mock.patch.dict(os.environ, kept | environ, clear=True), cache, mock.patch.object(sys, "path", [*sys.path]):
        try:
            yield
        finally:
            if "wandb" in sys.modules:
                sys.modules["wandb"].teardown()  # it keeps the first environment that it sees


def case(config: dict[str, Any], environ: dict[str, str], terminal: bool, code_cache: str) -> tuple[Any, ...]:
    """Runs the trainer in a world: (how it ended, the message, what it printed, what each rank saw)."""
    ended, seen, said = ("done", ""), Seen(), Terminal() if terminal else io.StringIO()
    with surroundings(environ, code_cache), watching(seen), contextlib.redirect_stdout(said):
        try:
            sft.run(from_dict(config), "mrl sft config.yaml")
        except UserError as error:
            ended = (type(error).__name__, str(error))
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, seen)
    return *ended, said.getvalue(), ranks


# ------------------------------------------------------------------------------------------------------------ outside


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that ended.

    config: dotted keys. root: the folder that it had for itself. other: gives a run of the same row with other keys.
    """

    config: Mapping[str, Any]
    inputs: pathlib.Path
    root: pathlib.Path
    ended: str
    message: str
    said: str
    ranks: list[Seen]
    other: Callable[..., Run]

    @property
    def folder(self) -> pathlib.Path:
        return pathlib.Path(self.config["output_dir"])

    @property
    def metrics(self) -> list[dict[str, float]]:
        return metrics.read(self.folder / "metrics.jsonl")

    @functools.cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "hf" / "model.safetensors")

    def batches(self, *, trains: bool = True) -> list[MicroBatch]:
        """Micro-batches of rank 0."""
        return [batch for batch in self.ranks[0].micro_batches if batch.trains == trains]

    def sequences(self, *, trains: bool = True) -> list[list[int]]:
        """Token ids of rank 0's sequences, in the order in which they came."""
        return [ids for batch in self.batches(trains=trains) for ids in batch.ids]

    @property
    def first_batch(self) -> MicroBatch:
        """The whole mini-batch of the first step, where it is one micro-batch."""
        (batch,) = (b for b in self.batches() if b.step == 1)
        return batch

    def calls(self, module: str, rank: int = 0) -> list[Call]:
        return [call for call in self.ranks[rank].calls if call.module == module]


class Runs:
    """Makes runs, each once."""

    def __init__(
        self,
        inputs: pathlib.Path,
        folder: pathlib.Path,
        *,
        base: Mapping[str, Any] = BASE,
        backend_key: str = "engine.backend",
        function: str = "tests.config.reach:case",
    ) -> None:
        """base: keys of all runs. backend_key: the one that a row's backend is given to. function: makes a run in a world."""
        self.inputs, self.folder = inputs, folder
        self.base, self.backend_key, self.function = base, backend_key, function
        self._made: dict[str, Run] = {}

    def __call__(self, row: Row, backend: str, value: Any) -> Run:
        return self._of(row, {**self.base, self.backend_key: backend, **row.given, row.key: value})

    def check(self, row: Row, backend: str) -> None:
        for value, expected in row.seen:
            run = self(row, backend, value)
            if isinstance(expected, Refusal):
                assert run.ended == expected.kind and expected.says in run.message, (value, run.ended, run.message)
            else:
                assert run.ended == "done", (value, run.ended, run.message)
                found = row.look(run)
                assert found == expected, (value, found)

    def _of(self, row: Row, keys: Mapping[str, Any]) -> Run:
        keys = {key: value for key, value in keys.items() if not isinstance(value, str) or value != DEFAULT}
        identity = json.dumps([keys, row.world, row.after, row.terminal], sort_keys=True)
        if identity not in self._made:
            self._made[identity] = self._run(row, keys)
        return self._made[identity]

    def _run(self, row: Row, keys: Mapping[str, Any]) -> Run:
        folder = self.folder / str(len(self._made))
        environ = {"HOME": f"{folder}/home", "NETRC": f"{folder}/home/netrc", "TERM": "xterm"}
        before = [] if row.after is None else [{name: keys[name] for name in keys if name != row.key} | row.after]
        for each in (*before, keys):
            config = {key: filled(value, {"{inputs}": self.inputs, "{run}": folder}) for key, value in each.items()}
            result = run_case(
                row.world, self.function, config=nested(config), environ=environ, terminal=row.terminal,
                code_cache=f"{folder}/home/code",
            )  # fmt: skip
        return Run(config, self.inputs, folder, *result, other=lambda **more: self._of(row, {**keys, **more}))


def filled(value: Any, places: Mapping[str, Any]) -> Any:
    """A config's value with the places that its texts name, also those in lists and mappings."""
    if isinstance(value, str):
        for name, place in places.items():
            value = value.replace(name, str(place))
    elif isinstance(value, list):
        return [filled(item, places) for item in value]
    elif isinstance(value, Mapping):
        return {key: filled(item, places) for key, item in value.items()}
    return value
