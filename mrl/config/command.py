"""The records of commands that train, and how one is found. All code that reads or starts a run reads them.

A record is the `COMMAND` of a module `mrl/commands/NAME.py`, or an entry point NAME of the group `mrl.commands` of an
installed package (docs/commands.md). Records are found by these names alone, so lower floors import none.

Beside it stands what a record is asked for: the models of a run, the phases of a step, and parts of a dry run's words.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import importlib
import pkgutil
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

import mrl
from mrl.config.backends import entry_points_of
from mrl.config.checks import micro_batch_tokens
from mrl.config.keys import Key, join_key, types_of, walk_keys
from mrl.config.schema import (
    CheckpointConfig,
    DivergenceConfig,
    EngineConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    RoleConfig,
    TrainConfig,
    TrainedModelConfig,
)
from mrl.config.sources import RowsConfig
from mrl.errors import ConfigError
from mrl.parallel import ParallelDims
from mrl.words import pluralize

if typing.TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "mrl.commands"
"""The entry-point group of commands: `NAME = "package.module:COMMAND"`."""


class Config(Protocol):
    """Sections that the config of every command has; its root has more."""

    @property
    def output_dir(self) -> str: ...

    @property
    def log(self) -> LogConfig: ...


class RowsRunConfig(Config, Protocol):
    """Sections in the config of a command that trains on rows: all but `mrl serve`."""

    @property
    def seed(self) -> int: ...

    @property
    def data(self) -> RowsConfig: ...

    @property
    def train(self) -> Any: ...  # with steps, epochs and global_batch_size

    @property
    def checkpoint(self) -> CheckpointConfig: ...


C = TypeVar("C", bound=Config)


@dataclasses.dataclass(frozen=True)
class Part:
    """A model that a run builds, on an engine."""

    role: str  # "" where the run has one model alone; else the section that holds it
    model: ModelConfig
    engine: EngineConfig
    head: Literal["lm", "value"] = "lm"
    optimizer: OptimizerConfig | None = None  # where it trains
    hf: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # its config.json, once that is read

    @property
    def used_engine(self) -> EngineConfig:
        """Returns the engine without what only a model that trains uses, if this one does not."""
        return dataclasses.replace(self.engine, cuda_graphs=self.engine.cuda_graphs and self.optimizer is not None)

    def key(self, name: str) -> str:
        """Returns the dotted key that the config has for `name` of this part, as in actor.engine."""
        return join_key(self.role, name)


@dataclasses.dataclass(frozen=True)
class Server:
    """An inference server that a run samples from."""

    kind: Literal["vllm", "sglang"]
    model: ModelConfig
    max_length: int  # tokens of the longest sequence
    temperature: float
    urls: str  # the key that takes the servers' urls


@dataclasses.dataclass(frozen=True)
class Distill:
    """How a student learns a teacher's distributions of next tokens."""

    loss: str
    beta: float
    top_k: int | None  # token ids at which both are compared; None: all of the vocabulary
    temperature: float
    first_temperature: float | None = None  # of each token's own label


SAMPLING_RANKS = "sampling ranks"
"""The role of what samples on ranks of its own, beside those that train (`rollout.ranks`)."""


@dataclasses.dataclass(frozen=True)
class Phase:
    """One role at work."""

    name: str  # in words, as "update of the actor"
    role: str
    kind: Literal["train", "forward", "sample"]
    sequences: int  # of the global batch that it goes through
    steps: int = 1  # optimizer steps that they are divided over
    cache_tokens: int = 0  # of sampling: tokens whose keys and values a replica keeps
    engine_fraction: float = 0.0  # of sampling by an engine inside the trainer: its share of the GPU's memory
    handed_to_tp: int = 0  # ranks of that engine, where it gets its weights from the role in this phase
    prefill_tokens: int = 0  # of sampling by the role itself: prompt tokens in one forward at most
    temperature: float = 1.0  # of sampling by the role itself, with the next three
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    distill: Distill | None = None  # where it learns distributions of next tokens, or tells them in a forward pass


@dataclasses.dataclass(frozen=True)
class Phases:
    """All phases of a step, and whether roles that do not work wait on the host."""

    phases: tuple[Phase, ...]
    offload_idle: bool = True
    entropy: Literal["none", "detached", "differentiable"] = "none"  # that updates make beside log-probs
    served_tokens: int = 0  # that servers sample at most, while all phases run
    notes: tuple[str, ...] = ()  # lines on what is assumed of the data, or is not in any phase


class TrainingCommand(abc.ABC, Generic[C]):
    """A command `mrl NAME CONFIG [KEY=VALUE]...` that trains.

    Which keys a resumed run may change is said at the keys themselves (`may_change` of `mrl.config.schema.key`).
    The command line imports every record to list it: what a method needs beside the keys, it imports itself.
    """

    name: str
    help: str  # of `mrl NAME --help`; its first sentence is in the list of commands
    examples: str  # command lines at the end of the help
    root: type[C]  # a frozen dataclass of keys
    trainer: str  # "module:function"; every rank calls function(config, command_line)
    task: str | None = None
    """"module:NAME" of a `mrl.trainers.rows.RowsTask` made of a config: the rows that `mrl data show` shows. None: it
    refuses configs of this command."""
    checked: str | None = None
    """"module:NAME" of a `mrl.check.command.CommandCheck`. None: `mrl check` refuses its configs."""
    order: int = 100  # place among the commands that train, where documentation and messages list them
    generates: bool = False  # whether its models sample text
    merges_adapters: bool = False  # whether the path of a model may be an adapter folder
    options: Mapping[str, str] = {}  # option of the command line -> the key that it sets, as "--port": "serve.port"
    null_fallbacks: Mapping[str, str] = {}  # key -> the key whose value it takes where it is null

    def null_values(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns key -> the value that null means there, by other keys of a resolved config, as plain data."""
        return {}

    def check(self, config: C) -> None:
        """Raises ConfigError where keys contradict each other or one would be left unread. It reads no file."""

    @abc.abstractmethod
    def parts(self, config: C) -> Sequence[Part]:
        """Returns the models that the config has a section for, whether or not the run needs them, each on its
        engine."""

    def needed(self, config: C) -> Collection[str]:
        """Returns the roles of the parts that the run builds. Raises ConfigError where keys do not go with them."""
        return [part.role for part in self.parts(config)]

    def rewrite_error_keys(self, config: C, role: str) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which what is said of `engine.x` or `model.x` is said of the role's own key."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def longest(self, config: C) -> tuple[int, str]:
        """Returns tokens of the longest sequence, and the key that sets it, or the keys with their values."""

    def longest_group(self, config: C) -> int:
        """Returns tokens of the longest sequences that one micro-batch holds together, as both of a pair."""
        return self.longest(config)[0]

    def on_rows(self, config: C) -> RowsRunConfig | None:
        """Returns the config with the sections of a run on rows; None where it has none of them."""
        return typing.cast(RowsRunConfig, config)

    def packing(self, config: C) -> bool:
        """Returns whether micro-batches hold sequences end to end."""
        return _rows(self, config).data.packing

    def rows_of_batch(self, config: C) -> int:
        """Returns the rows of data.train in one global batch."""
        return _rows(self, config).train.global_batch_size

    def smallest_batch(self, config: C, role: str) -> tuple[str, int]:
        """Returns the sequences of which every data-parallel replica of a part gets at least one: their key and
        number."""
        return "train.global_batch_size", _rows(self, config).train.global_batch_size

    def processes_beside(self, config: C) -> int:
        """Returns how many processes of a run do not train: the last ones."""
        return 0

    def processes_that_train(self, config: C, world_size: int) -> int:
        """Returns how many of a run's processes train. Raises ConfigError if none do."""
        beside = self.processes_beside(config)
        if beside >= world_size:
            why = f"leaves none of the {world_size} processes to the trainer"
            raise ConfigError("rollout.ranks", beside, why, "start more processes, or give fewer ranks")
        return world_size - beside

    def parts_beside(self, config: C, parts: Sequence[Part]) -> Sequence[Part]:
        """Returns the models of these processes."""
        return ()

    def check_processes(self, config: C, parts: Sequence[Part], world_size: int) -> None:
        """Raises a UserError if a model or the number of processes does not fit. Layouts are checked before."""

    def check_files(self, config: C) -> None:
        """Raises a UserError for a missing file that only this command's config names."""

    def check_code(self, config: C) -> None:
        """Loads the user's own code, as a run does when it starts. Raises ConfigError where it is none."""

    def check_rows(self, config: C, first: Sequence[tuple[dict[str, Any], str]]) -> None:
        """Raises ConfigError if one of the rows lacks what the config names. first: rows with their file and line."""

    @abc.abstractmethod
    def describe(self, config: C, parts: Sequence[Part], layouts: Sequence[ParallelDims]) -> Sequence[str]:
        """Returns what a dry run says beside the resolved config, line by line. layouts: of each part."""

    def engine_config(self, config: C, part: Part) -> RoleConfig:
        """Returns what the engine of a part is built from, as the run does it."""
        tokens = micro_batch_tokens(part.engine.micro_batch, self.longest_group(config))
        micro_batch = dataclasses.replace(part.engine.micro_batch, tokens=tokens)
        return RoleConfig(
            model=part.model, engine=dataclasses.replace(part.engine, micro_batch=micro_batch),
            optimizer=part.optimizer, head=part.head, packing=self.packing(config),
            mtp=part.model.mtp if isinstance(part.model, TrainedModelConfig) else None,
        )  # fmt: skip

    def phases(self, config: C) -> Phases:
        """Returns what a step consists of, for `mrl plan`: by default an update of every part that trains."""
        size = _rows(self, config).train.global_batch_size
        trained = [
            part for part in self.parts(config) if part.optimizer is not None and part.role in self.needed(config)
        ]
        return Phases(tuple(Phase(f"update of the {p.role or 'model'}", p.role, "train", size) for p in trained))

    def server(self, config: C) -> Server | None:
        """Returns the inference servers that a run samples from; None if it needs none."""
        return None


def _rows(command: TrainingCommand[Any], config: Any) -> RowsRunConfig:
    section = command.on_rows(config)
    assert section is not None, f"mrl {command.name} trains on no rows"
    return section


def describe_length(train: TrainConfig) -> str:
    """Returns the length of a run in words: steps, or passes over the data."""
    return f"{train.steps} steps" if train.resolved_epochs is None else pluralize(train.resolved_epochs, "epoch")


def describe_divergence(keys: DivergenceConfig) -> tuple[str, str]:
    """Returns the divergence from a teacher, and the token ids at which it is measured, in words."""
    kind = f"jsd (beta {keys.resolved_beta:g})" if keys.loss == "jsd" else keys.loss
    ids = "the whole vocabulary" if keys.top_k is None else f"its {keys.top_k} likeliest tokens and the rest"
    return kind, ids


def describe_layout(dims: ParallelDims) -> str:
    """Returns a layout and the number of its processes, in words."""
    return f"{dims.describe()} on {pluralize(dims.world_size, 'process', 'processes')}"


def describe_micro_batch(engine: EngineConfig, max_length: int) -> str:
    """Returns what a micro-batch holds, in words."""
    tokens = micro_batch_tokens(engine.micro_batch, max_length)
    if engine.micro_batch.tokens == "auto":
        return f"auto: up to {tokens} tokens on CPUs"
    return f"{engine.micro_batch.size} sequences" if tokens is None else f"up to {tokens} tokens"


def own_names() -> list[str]:
    """Returns the names of mrl's own commands."""
    folders = [f"{folder}/commands" for folder in mrl.__path__]
    return sorted(module.name for module in pkgutil.iter_modules(folders) if not module.name.startswith("_"))


@functools.cache
def registered_commands() -> Mapping[str, Sequence[EntryPoint]]:
    """Returns what installed packages register as commands, by name."""
    return entry_points_of(GROUP)


def names() -> list[str]:
    """Returns the names of all commands."""
    return sorted({*own_names(), *registered_commands()})


def record(name: str) -> Any:
    """Returns the record of the command `name`. One of mrl's own is not to be replaced. Raises KeyError where there is
    none."""
    if name in own_names():
        return importlib.import_module(f"mrl.commands.{name}").COMMAND
    first, *others = registered_commands()[name]
    key = f"mrl {name}"
    if others:
        raise ConfigError(key, why=f"is registered by {1 + len(others)} packages", fix="uninstall all but one")
    try:
        made = first.load()
    except Exception as error:  # the package's own code runs, and may raise anything
        why = f"cannot be imported from {first.value} ({type(error).__name__}: {error})"
        raise ConfigError(key, why=why, fix="mend or uninstall that package") from error
    return made


def training(command_names: Collection[str]) -> list[TrainingCommand]:
    """Returns those of the commands that train, in their order.

    One of a package that is broken is left out: `mrl NAME` says what is wrong there, and no other command fails by it.
    """
    commands = []
    for name in command_names:
        with contextlib.suppress(ConfigError):
            if isinstance(made := record(name), TrainingCommand):
                commands.append(made)
    return sorted(commands, key=lambda command: (command.order, command.name))


def all_training() -> list[TrainingCommand]:
    return training(names())


def roots() -> dict[str, type]:
    """Returns name -> the root of its config, of all commands that train."""
    return {command.name: command.root for command in all_training()}


def command_of(root: type) -> TrainingCommand:
    """Returns the command whose config is a `root`."""
    for command in all_training():
        if command.root is root:
            return command
    raise LookupError(f"{root.__name__} is the config of no command")


def command_of_data(data: Mapping[str, Any]) -> TrainingCommand:
    """Returns the command whose config `data` is: a user's YAML, or what a run of this or an older version has saved.

    It is the one that knows most of the given keys and choices, then the one that needs least beside them; of these
    one of mrl's own.
    """
    given = dict(data)
    for name, section in data.items():
        if isinstance(section, Mapping):
            given |= {f"{name}.{key}": value for key, value in section.items()}

    def distance(command: TrainingCommand) -> tuple[int, int, bool, int]:
        keys = {key.path: key for key in walk_keys(command.root, sections=True) if key.path.count(".") < 2}
        foreign = [path for path, value in given.items() if path not in keys or not _is_choice(keys[path], value)]
        required = {path for path, key in keys.items() if key.required and "." not in path}
        is_foreign = command.name not in own_names()
        return len(foreign), len(required - given.keys()), is_foreign, len(keys.keys() - given.keys())

    return min(all_training(), key=distance)


def _is_choice(key: Key, value: Any) -> bool:
    """Returns whether a key that has choices has the value among them."""
    return typing.get_origin(key.annotation) is not Literal or value in typing.get_args(key.annotation)


def check_recognised(raw: Mapping[str, Any], path: Any, root: type) -> None:
    """Raises ConfigError if the file at `path` has the sections of another command, and not those of `root`."""
    if raw.keys() <= types_of(root).keys():
        return
    command = command_of_data(raw)
    if raw.keys() <= types_of(command.root).keys():  # type: ignore[arg-type]
        why = f"has the sections of a config of mrl {command.name}"
        raise ConfigError(path, why=why, fix=f"run mrl {command.name} {path}")
