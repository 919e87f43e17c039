"""Defines the part of a training command for `mrl check`. `checked` of its record names it as "module:NAME"."""

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
    """Checks a step of one training command."""

    @abc.abstractmethod
    def subjects(self, config: C, parts: Sequence[Part], folders: Mapping[str, str]) -> list[Subject]:
        """Returns the models that train, each with its loss.

        parts: models with an optimizer. folders: role -> folder of its model.path.
        """

    @abc.abstractmethod
    def rows(
        self, config: C, subject: Subject, model: CheckedModel, *, sequences: int, length: int, device: str
    ) -> Rows:
        """Returns the batch of the check; all models share it.

        subject, model: the first that trains. sequences: at most this many. length: tokens of one, at most. device: for
        running the model to make them.
        """


def checked_of(command: TrainingCommand) -> CommandCheck[Any]:
    """Returns the check of a command whose `checked` is set."""
    assert command.checked is not None, command.name
    module, _, name = command.checked.partition(":")
    return cast(CommandCheck[Any], getattr(importlib.import_module(module), name))
