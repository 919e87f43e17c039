"""What a command that trains brings for `mrl check`: its record's `checked` names one of these as "module:NAME"."""

from __future__ import annotations

import abc
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

from mrl.check.folder import CheckedModel
from mrl.check.rows import Rows
from mrl.check.subject import Subject
from mrl.config.command import Config, Part, TrainingCommand

C = TypeVar("C", bound=Config)


class CommandCheck(abc.ABC, Generic[C]):
    """Check a step of one command that trains."""

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


def checked_of(command: TrainingCommand) -> CommandCheck[Any]:
    """Returns what a command brings. command: one whose `checked` is set."""
    assert command.checked is not None, command.name
    module, _, name = command.checked.partition(":")
    return cast(CommandCheck[Any], getattr(importlib.import_module(module), name))
