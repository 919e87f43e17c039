"""Says what differs between `mrl sft`, `mrl dpo` and `mrl rm`. Their loop is one."""

from __future__ import annotations

import abc
import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, Protocol, Self, TypeVar

from transformers import PreTrainedTokenizerBase

from mrl.batch import Batch
from mrl.config.checks import micro_batch_tokens
from mrl.config.command import RowsRunConfig
from mrl.config.schema import EngineConfig, ModelConfig, MTPConfig, OptimizerConfig, RoleConfig
from mrl.data.batches import BatchSource
from mrl.data.dataset import Part, RowDataset
from mrl.data.stream import Report
from mrl.data.streamed import Exchange, one_process_exchange
from mrl.engine.base import Ctx, LossFn
from mrl.roles.dispatch import WorkerDispatch
from mrl.roles.frozen import FrozenModel
from mrl.trainers.trainer import Trainer

C = TypeVar("C", bound=RowsRunConfig)
HFConfig = dict[str, Any]


class RowsTask(Protocol):
    """Gives the rows of a command for `mrl data show`. A `Task` is one. With sources in data.train it has a Task's
    `of_data` and `source`, too."""

    def dataset(
        self, tokenizer: PreTrainedTokenizerBase, folder: str, hf_config: HFConfig, part: Part
    ) -> RowDataset[Any]:
        """Returns the rows of data.train or data.eval."""


def role_config(
    config: Any,
    folder: str,
    *,
    longest: int,
    model: ModelConfig | None = None,
    engine: EngineConfig | None = None,
    optimizer: OptimizerConfig | None = None,
    mtp: MTPConfig | None = None,
    head: Literal["lm", "value"] = "lm",
) -> RoleConfig:
    """Returns what an engine of a run on rows is built from.

    folder: of the model. longest: most tokens of a group of sequences; a micro-batch holds groups whole. model, engine:
    None for those that train.
    """
    engine = engine or config.engine
    tokens = micro_batch_tokens(engine.micro_batch, longest)
    return RoleConfig(
        model=dataclasses.replace(model or config.model, path=folder),
        engine=dataclasses.replace(engine, micro_batch=dataclasses.replace(engine.micro_batch, tokens=tokens)),
        optimizer=optimizer,
        seed=config.seed,
        head=head,
        packing=config.data.packing,
        mtp=mtp,
    )


class Task(abc.ABC, Generic[C]):
    """The rows of a command, the batches that they make, and the loss on them."""

    loss_fn: LossFn
    denominator = "tokens"
    """Of `Batch.denominators`, what the loss is divided by."""
    means: Mapping[str, str] = {}
    """Metric that `loss_fn` gives -> the denominator whose mean it is."""

    def __init__(self, config: C) -> None:
        self.config = config
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

    def begin(self, trainer: Trainer, sets: Sequence[RowDataset[Any]]) -> None:
        """Called once, when the model has been built and before a checkpoint is loaded. Collective.

        sets: data.train, and data.eval if there is one. Raises Stopped after a signal.
        """
        return  # most tasks need nothing

    def frozen_models(self, folder: str) -> Mapping[str, FrozenModel]:
        """Returns the key of each model beside the one that trains -> what a resume has to find there again.

        folder: of the model that trains.
        """
        return {}

    def prepare(self, dispatch: WorkerDispatch, batch: Batch) -> tuple[Batch, Ctx]:
        """Returns a global mini-batch with all that the loss needs, and the loss's own ctx. Collective; outside of the
        engine's modes."""
        return batch, {}

    def means_of(self, batch: Batch, ctx: Ctx) -> dict[str, float]:
        """Returns the metrics of a step on a prepared batch, but those that are means of nothing.

        ctx: of `prepare`, with "metrics" as an engine gives them.
        """
        found = ctx["metrics"]
        means = {name: found[name] for name, count in self.means.items() if name in found and batch.denominators[count]}
        return means | ({"train/mtp_loss": found["mtp_loss"]} if "mtp_loss" in found else {})  # not of an evaluation

    def after_export(self, path: str) -> None:
        """Adds to the exported model in the folder `path`. Called on the main process."""
        return  # most tasks add nothing
