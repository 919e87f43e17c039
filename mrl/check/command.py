"""What a command that trains brings for `mrl check`: its record's `checked` names one of these as "module:NAME"."""

from __future__ import annotations

import abc
import dataclasses
import importlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from mrl.check.folder import CheckedModel
from mrl.check.layouts import Layout
from mrl.check.rows import Rows
from mrl.check.subject import Subject
from mrl.config.answers import AnswersConfig
from mrl.config.command import Config, Part, TrainingCommand
from mrl.config.schema import EngineConfig, MicroBatchConfig, ModelConfig, OptimizerConfig, TrainedModelConfig

C = TypeVar("C", bound=Config)
A = TypeVar("A", bound=AnswersConfig)
M = TypeVar("M", bound=ModelConfig)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoSteps:
    """What the two steps of `--resume` run on, in place of what the config names."""

    models: Mapping[str, CheckedModel]  # of each role that trains
    layouts: Mapping[str, Layout]
    rows: Rows
    place: Path  # for files that the steps read
    dtype: Any

    @property
    def processes(self) -> int:
        return math.lcm(*(layout.processes for layout in self.layouts.values()))

    def model(self, own: M, role: str) -> M:
        """Returns the `model` of a role on the folder of the check."""
        made = self.models[role]
        if isinstance(own, TrainedModelConfig):
            own = dataclasses.replace(own, mtp=None)  # the check's folders have no MTP layers
        return dataclasses.replace(own, path=made.path, init=made.init, dtype=self.dtype)

    def engine(self, own: EngineConfig, role: str) -> EngineConfig:
        """Returns the `engine` of a role in its layout."""
        fsdp, size = dataclasses.replace(own.fsdp, replicate=1), MicroBatchConfig(size=2)
        return dataclasses.replace(own, parallel=self.layouts[role].parallel, micro_batch=size, fsdp=fsdp)

    def of_answers(self, config: A) -> A:
        """Returns the config of a command that trains on answers, on the user's own rows."""
        train = dataclasses.replace(
            config.train, steps=2, epochs=None, eval_every=None, eval_batches=None, guards=False,
            global_batch_size=max(4, self.processes),
        )  # fmt: skip
        return dataclasses.replace(
            config,
            model=self.model(config.model, ""),
            engine=self.engine(config.engine, ""),
            optimizer=self.optimizer(config.optimizer),
            data=dataclasses.replace(config.data, eval=None),
            train=train,
        )

    def optimizer(self, own: OptimizerConfig) -> OptimizerConfig:
        """Returns an optimizer whose schedule fits in two steps."""
        return dataclasses.replace(own, warmup_steps=0, decay_steps=None)


class Checked(abc.ABC, Generic[C]):
    """How the step of one command that trains is checked."""

    resumes_without: str = ""  # what `two_steps` leaves out of a config, beside what all commands do

    @abc.abstractmethod
    def subjects(self, config: C, parts: Sequence[Part], folders: Mapping[str, str]) -> list[Subject]:
        """Returns the models that train, each with its loss. parts: those that have an optimizer. folders: what each
        role's model.path stands for."""

    @abc.abstractmethod
    def rows(
        self, config: C, subject: Subject, model: CheckedModel, *, sequences: int, length: int, device: str
    ) -> Rows:
        """Returns the batch of the check, which all models share. subject, model: the first that trains. sequences,
        length: how many, and tokens of one, at most. device: where the model may be run to make them."""

    def two_steps(self, config: C, small: TwoSteps) -> C:
        """Returns the config of two short steps of the command's trainer. It evaluates nothing and reaches no server.
        The caller has set the section `checkpoint`, to save after each of them, and `log`, and sets output_dir.

        A command without it has no --resume.
        """
        raise NotImplementedError

    @property
    def resumes(self) -> bool:
        """Whether the command has `two_steps`."""
        return type(self).two_steps is not Checked.two_steps


def checked_of(command: TrainingCommand) -> Checked[Any]:
    """Returns what a command brings. command: one whose `checked` is set."""
    assert command.checked is not None, command.name
    module, _, name = command.checked.partition(":")
    return cast(Checked[Any], getattr(importlib.import_module(module), name))
