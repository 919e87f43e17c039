"""What a run on rows trains for: what differs between `mrl sft`, `mrl dpo` and `mrl rm`, whose loop is one."""

from __future__ import annotations

import abc
import copy
import dataclasses
import functools
import operator
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, Self, TypeVar

from transformers import PreTrainedTokenizerBase

from mrl.batch import Batch
from mrl.config.checks import micro_batch_tokens
from mrl.config.command import RowsRunConfig, command_of
from mrl.config.load import to_dict
from mrl.config.resume import check_resume, expand_nulls
from mrl.config.schema import EngineConfig, RoleConfig
from mrl.converters.hub import WEIGHTS, check_same_model, model_fingerprint
from mrl.data.batches import BatchSource
from mrl.data.dataset import Part, RowDataset
from mrl.data.stream import Report
from mrl.data.streamed import Exchange, one_process_exchange
from mrl.engine.base import BaseEngine, Ctx, LossFn
from mrl.engine.lora.identity import weights_fingerprint
from mrl.trainers.console import Console
from mrl.trainers.signals import StopSignal

C = TypeVar("C", bound=RowsRunConfig)
HFConfig = dict[str, Any]


class RowsTask(Protocol):
    """What `mrl data show` asks of a command: its rows. A `Task` is one. Where data.train may be a list of sources, it
    has a Task's `of_data`, `source` and `steps_of_batch` too."""

    def dataset(
        self, tokenizer: PreTrainedTokenizerBase, folder: str, hf_config: HFConfig, part: Part
    ) -> RowDataset[Any]:
        """Returns the rows of data.train or data.eval."""


@dataclasses.dataclass(frozen=True)
class FrozenModel:
    """A model that never trains, so that no checkpoint holds it."""

    folder: str
    is_read: bool = True  # else a server has its weights, and the folder is of its tokenizer
    is_cached: bool = False  # what it says of all rows is computed by `Task.begin`, and written

    def fingerprint(self) -> dict[str, str]:
        """Returns `model_fingerprint`, and what tells a sample of the weights from others."""
        hashes = model_fingerprint(self.folder)
        if self.is_read and any(pathlib.Path(self.folder).glob("*.safetensors")):  # it may start from scratch
            hashes[WEIGHTS] = weights_fingerprint(self.folder)
        return hashes


def engine_of_groups(engine: EngineConfig, longest: int) -> EngineConfig:
    """Returns an engine whose micro-batches hold whole groups of sequences (of one, or both of a pair).

    longest: most tokens of a group.
    """
    tokens = micro_batch_tokens(engine.micro_batch, longest)
    return dataclasses.replace(engine, micro_batch=dataclasses.replace(engine.micro_batch, tokens=tokens))


def saved_state(engine: BaseEngine, folder: str) -> dict[str, Any]:
    """Returns the trainer's state of a checkpoint. Where that cannot be read alone, all of the checkpoint is loaded,
    which says what is wrong with it. Collective."""
    state = engine.on_main(lambda: engine.saved_state(folder))
    return engine.load_checkpoint(folder) if state is None else state


class Task(abc.ABC, Generic[C]):
    """The rows of a command, the batches that they make, and the loss on them."""

    steps_of_batch = 1
    """Optimizer steps on each batch of rows."""
    loss_fn: LossFn
    denominator = "tokens"
    """Of `Batch.denominators`, what the loss is divided by."""
    means: Mapping[str, str] = {}
    """Metric that `loss_fn` gives -> the denominator whose mean it is."""

    def __init__(self, config: C) -> None:
        self.config = config
        self.fingerprints: Mapping[str, dict[str, str]] = {}  # of `frozen_models`, as they were when the run began
        self.exchange: Exchange = one_process_exchange  # by which ranks get rows of data.train that are streamed

    def of_data(self, data: Any) -> Self:
        """Returns the same task on another section `data`."""
        made = copy.copy(self)
        made.config = dataclasses.replace(self.config, data=data)  # type: ignore[type-var]
        return made

    @abc.abstractmethod
    def role(self, folder: str) -> RoleConfig:
        """Returns the role that trains. folder: what `model.path` stands for."""

    @abc.abstractmethod
    def dataset(
        self, tokenizer: PreTrainedTokenizerBase, folder: str, hf_config: HFConfig, part: Part
    ) -> RowDataset[Any]:
        """Returns the rows of data.train or data.eval."""

    @abc.abstractmethod
    def batch_of(self, rows: Sequence[Any]) -> Batch:
        """Returns the global mini-batch of some rows."""

    def source(self, dataset: RowDataset[Any]) -> BatchSource[Any]:
        """Returns the endless batches of data.train."""
        config = self.config
        return BatchSource(
            dataset, global_batch_size=config.train.global_batch_size, seed=config.seed, shuffle=config.data.shuffle,
            batch_of=self.batch_of,
        )  # fmt: skip

    @abc.abstractmethod
    def eval_batches(self, dataset: RowDataset[Any], report: Report | None) -> Iterator[Batch]:
        """Yields all usable rows of data.eval once. report: of rows left out, is filled on the way."""

    def begin(
        self, engine: BaseEngine, sets: Sequence[RowDataset[Any]], place: pathlib.Path, console: Console,
        stop: StopSignal,
    ) -> None:  # fmt: skip
        """Called once, when the model has been built and before a checkpoint is loaded. Collective.

        sets: data.train, and data.eval where there is one. place: output_dir. stop: what takes long looks at it, and
        raises Stopped.
        """
        engine.set_loss_fn(self.loss_fn, self.denominator)

    def frozen_models(self, folder: str) -> Mapping[str, FrozenModel]:
        """Returns the key of each model beside the one that trains -> what a resume has to find there again.

        folder: of the model that trains.
        """
        return {}

    def fingerprints_now(self, engine: BaseEngine) -> dict[str, dict[str, str]]:
        """Returns, by key, what tells `frozen_models` from others. engine: of the model that trains."""
        return {key: one.fingerprint() for key, one in self.frozen_models(engine.config.model.path).items()}

    def has_cache(self, engine: BaseEngine) -> bool:
        """Returns whether `begin` may take hours for a cache, and write it over that of the run. A checkpoint that
        cannot be read has to be passed over, or to end the run, before that."""
        return any(one.is_cached for one in self.frozen_models(engine.config.model.path).values())

    def refuse_other_run(self, engine: BaseEngine, source: BatchSource[Any], state: Mapping[str, Any] | None) -> None:
        """Raises what a resume will where config, models or data are not the checkpoint's, so that it is raised before
        `begin`. state: the trainer's in the checkpoint. Collective."""
        if state:  # an import has none
            check_resume(state["config"], to_dict(self.config))
            self.fingerprints = engine.on_main(lambda: self.fingerprints_now(engine))
            self.check_frozen(state)
            source.load_state_dict(state["data"])

    def check_frozen(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError where a model of `fingerprints` is not the checkpoint's. state: the trainer's in it."""
        both = expand_nulls(state["config"], to_dict(self.config), command_of(type(self.config)))
        for key, found in self.fingerprints.items():
            before, now = (str(functools.reduce(operator.getitem, key.split("."), plain)) for plain in both)
            # older versions saved no "models"
            check_same_model(state.get("models", {}).get(key), found, before=before, now=now, key=key)

    def prepare(self, engine: BaseEngine, batch: Batch) -> tuple[Batch, Ctx]:
        """Returns a global mini-batch with all that the loss needs, and the loss's own ctx. Collective; outside of the
        engine's modes."""
        return batch, {}

    def means_of(self, batch: Batch, ctx: Ctx) -> dict[str, float]:
        """Returns the metrics of a step on a prepared batch, but those that are means of nothing."""
        found = ctx["metrics"]
        means = {name: found[name] for name, count in self.means.items() if name in found and batch.denominators[count]}
        return means | ({"train/mtp_loss": found["mtp_loss"]} if "mtp_loss" in found else {})  # not of an evaluation

    def export(self, engine: BaseEngine, path: str) -> None:
        """Writes the trained model to the folder `path`. Collective."""
        engine.export_hf(path)
