"""The commands of the command line, a module each, whose `COMMAND` is its record; `mrl.cli` makes them click commands.

A command that trains is a `mrl.config.command.TrainingCommand`; any other is a `Command` or a `Group` of them. A
module here is imported whenever commands are listed: what a command works with, its functions import.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from mrl.words import launched_rank

EXIT_USER_ERROR, EXIT_FAULT, EXIT_STOPPED, EXIT_INTERRUPTED = 2, 1, 75, 130

Kind = Literal["text", "path", "overrides", "number", "fraction"]
"""What a word of the command line is. overrides: KEY=VALUE, whose keys a shell completes. number: a whole one.
fraction: any number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Argument:
    """Words of the command line by their place. They reach the command's `run` as the keyword `name`."""

    name: str
    kind: Kind = "text"
    metavar: str | Callable[[], str] | None = None
    required: bool = True
    several: bool = False
    choices: Callable[[], Sequence[str]] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """An option of the command line: with a value, or a flag."""

    names: str  # "--lines", or "-n --lines"
    help: str
    into: str | None = None  # the keyword of `run`; None is the last of the names with _ for -
    kind: Kind | Literal["flag"] = "text"
    metavar: str | None = None
    several: bool = False
    choices: Callable[[], Sequence[str]] | None = None
    minimum: float | None = None  # of a number or fraction; a maximum needs one
    maximum: float | None = None
    default: Any = None  # shown in the help


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A command that does not train."""

    help: str  # of `mrl NAME --help`; its first sentence is in the list of commands
    examples: str  # command lines at the end of the help
    run: Callable[..., int | None]  # gets the arguments and options as keywords; returns the exit code, None for 0
    params: Sequence[Argument | Option] = ()
    root: type | None = None  # what has the keys of its KEY=VALUE, which a shell completes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Commands under one name, as in `mrl convert import`."""

    help: str
    examples: str
    commands: Mapping[str, Command]


def say(message: str) -> None:
    """Prints one line on stderr. Ranks of torchrun or srun each print theirs, those above 0 with their number.

    Before ranks have met, one may find a mistake and the others not. So a line names the node that lacks something.
    """
    rank = launched_rank(os.environ)
    prefix = "mrl: " if rank == "0" else f"mrl: rank {rank}: "
    # in one write: print's own line end is another, and lines of several ranks would be one
    print(f"{prefix}{' '.join(message.split())}\n", end="", file=sys.stderr, flush=True)


def echo(text: str, end: str = "\n") -> None:
    """Prints a text of a command at once."""
    print(text, end=end, flush=True)


CONFIG = Argument(name="config_path", kind="path", metavar="CONFIG")
OVERRIDES = Argument(name="overrides", kind="overrides", metavar="[KEY=VALUE]...", required=False, several=True)
NPROC = Option(
    names="--nproc", kind="number", minimum=1,
    help="Processes to start; default: the GPUs, else what the layout needs.",
)  # fmt: skip

JSON = Option(
    names="--json", into="as_json", kind="flag", help="Print one JSON object in place of text."
)  # fmt: skip

TRAINING_ARGUMENTS: Sequence[Argument | Option] = (
    CONFIG,
    OVERRIDES,
    NPROC,
    Option(
        names="--dry-run", kind="flag",
        help="Check keys, files, layouts, first rows and each model's config.json, print what would run. "
        "Weights and checkpoints are read by the run alone, and so is what is not on this machine.",
    ),
)  # fmt: skip
"""The words of a command that trains."""
