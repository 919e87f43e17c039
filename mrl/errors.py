"""The user's mistakes: each is one clear line that names the key or file, the value, and what would work.

    raise ConfigError("optimizer.min_lr", 0.1, "is above optimizer.lr 0.01", "give at most 0.01")
    optimizer.min_lr: value 0.1 is above optimizer.lr 0.01; give at most 0.01

The command line turns a `UserError` into that line on stderr and exit code 2, without a traceback.
Everything else that escapes is a fault of ours: a traceback and exit code 1.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import errno
import json
from collections.abc import Iterator, Mapping
from typing import Any, Self

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems that have no locks."""

MAX_LINE = 400
"""Characters of the message of an error about keys, rows or a model: values that users write may be of any length."""

MAX_SHOWN = 80
"""Characters of a value in a message."""

MAX_MISTAKES = 10
"""Lines of the message of a config with several mistakes."""


def one_line(text: object, longest: int | None = None) -> str:
    """Returns `text` on one line, with unprintable characters escaped.

    Of a line that is long its long words (values, paths) lose their middle. If it is longer than `longest` still, so
    does the line.
    """
    line = printable(" ".join(str(text).split()))
    if longest is None:
        return line
    if len(line) > min(longest, MAX_LINE):
        line = " ".join(shortened(word, 160 if "/" in word else 60) for word in line.split(" "))
    if len(line) <= longest:
        return line
    tail = longest * 2 // 5  # what would work stands at the end
    return f"{line[: longest - tail - 5]} ... {line[-tail:]}"


def printable(text: str) -> str:
    """Returns a text with what cannot be printed escaped: colours and marks of direction, half characters."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def first_line(error: BaseException) -> str:
    """Returns the first line with text of an error; the error's type if there is none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def shortened(text: str, longest: int = 160) -> str:
    """Returns a path or a name as the user wrote it; of a long one, both ends."""
    if len(text) <= longest:
        return text
    return f"{text[: longest // 2 - 2]}...{text[2 - longest // 2 :]}"


class Shown(str):
    """A value in the words that a message has it in: `show` leaves it as it is."""


def quoted(text: str) -> Shown:
    """Returns `shortened` in quotes: for paths and URLs, whose end tells as much as the beginning."""
    return Shown(repr(shortened(text)))


def show(value: Any) -> str:
    """Returns a value as the user may have written it, on one line and not too long."""
    if isinstance(value, Shown):
        return value
    try:
        text = json.dumps(value, ensure_ascii=False, default=_plain)
    except (RecursionError, TypeError, ValueError):  # too deep, with dates for keys, or thousands of digits
        text = "(a value that JSON cannot hold)"
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def _plain(value: Any) -> Any:
    """Returns what JSON can have in place of a section of a config, or of something else."""
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dict(value) if isinstance(value, Mapping) else str(value)


class _Absent(enum.Enum):
    """Stands for the value of an error without one."""

    VALUE = enum.auto()


class UserError(Exception):
    """Something the user can put right; `str` is one line and says how.

    `UserError(key, value, why, fix)` is the line `key: value VALUE why; fix`, without a value where none is given. A
    text alone is the line, and its `key` is None.
    """

    longest: int | None = None
    said = False  # its line has been shown already, for all ranks
    rank: int | None = None  # that found it, where all ranks raise it

    def __init__(self, key: object = "", value: object = _Absent.VALUE, why: str = "", fix: str = "") -> None:
        self.key = str(key) if why else None  # dotted; or the file, or file and line, that the error is about
        self.value = value
        self.why = why
        self.fix = fix  # what would work
        shown = f"value {show(value)} " if value is not _Absent.VALUE else ""
        line = f"{key}: {shown}{why}" if why else key
        self.line = one_line(f"{line}; {fix}" if fix else line, self.longest)
        super().__init__(self.line)

    def __reduce__(self) -> tuple[Any, ...]:
        """Lets an error travel between processes with all its lines: a new one would join them."""
        return _remade, (type(self), self.args, vars(self))

    def going_on(self, text: str) -> Self:
        """Returns the same error with `text` appended to its line."""
        if self.key is None:
            return type(self)(f"{self}; {text}")
        return type(self)(self.key, self.value, self.why, f"{self.fix}; {text}" if self.fix else text)

    def under(self, section: str) -> Self:
        """Returns the same error of the key where it stands in `section`."""
        assert self.key is not None, f"an error of no key: {self}"
        return type(self)(f"{section}.{self.key}", self.value, self.why, self.fix)


def _remade(kind: type[UserError], args: tuple[Any, ...], fields: Mapping[str, Any]) -> UserError:
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(fields)
    return error


class ConfigError(UserError):
    """A config key is unknown, has a wrong value, or does not fit the others: `dotted.key: value ...; fix`."""

    longest = MAX_LINE
    others: tuple[ConfigError, ...] = ()  # mistakes of the same parse, each with a line of its own in `str`


class MistakeCollector:
    """Collects the mistakes of one parse as a context, and raises them as one error at its end."""

    def __init__(self) -> None:
        self.found: list[ConfigError] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self.found:
            raise self._joined()

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Keeps a ConfigError of the context, so that the parse goes on."""
        try:
            yield
        except ConfigError as error:
            others, error.others = error.others, ()
            self.found += [error, *others]

    def _joined(self) -> ConfigError:
        """Returns the first mistake, with the lines of the next ones in its text, up to `MAX_MISTAKES`."""
        self.found.sort(key=lambda one: one.why.startswith("is missing"))  # a name with a typo may be what is missing
        first, *others = self.found
        first.others = tuple(others)
        lines = [one.line for one in self.found[:MAX_MISTAKES]]
        if len(self.found) > MAX_MISTAKES:
            left = len(self.found) - MAX_MISTAKES
            lines.append(
                f"{left} more mistakes; correct these first (of verl, NeMo-RL, TRL: mrl config translate FILE)"
            )
        first.args = ("\n".join(lines),)
        return first


def unwritable(output_dir: str, at: object, error: OSError) -> ConfigError:
    """Returns the line on an output_dir that cannot be made or written. at: the file or folder of `error`."""
    why = f"cannot be written ({shortened(str(at), 80)}: {error.strerror or error})"
    fix = "make room, or give another folder" if is_full(error) else "give a folder that can"
    return ConfigError("output_dir", quoted(output_dir), why, fix)


def is_full(error: OSError) -> bool:
    """Returns whether a disk or a quota is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


class DataError(UserError):
    """A data file or row is wrong: `file:line: what is wrong; what would work`."""

    longest = MAX_LINE
    may_be_skipped = False  # `data.on_bad_row: skip` would leave the row out


class ModelError(UserError):
    """A Hugging Face model folder is wrong or not supported: names the file, field or tensor."""

    longest = 600  # names of tensors, missing and left over, are a few of each


class CheckpointError(UserError):
    """A checkpoint is damaged, foreign or does not fit this run: names the checkpoint and what is wrong."""


class DamagedCheckpoint(CheckpointError):
    """Files of a checkpoint are not what was saved: nothing of it was loaded, and an older one may be whole."""


class TrainingError(UserError):
    """Training cannot go on (a guard failed, a loss became NaN): names the step and the parameters. No fault of a
    program can be told from a rate that is too high, so it ends as the user's mistakes do."""


class RewardError(UserError):
    """A reward function failed, took too long or gave no number: names the function, the row and the value."""


class ServerError(UserError):
    """An inference server is dead, too slow, not set up for this, or answers wrongly: names its url and what it said.

    status: the HTTP status, if the server gave one. lost: whether the server is dead, hangs or stays busy, so that
    another one may be asked.
    """

    def __init__(self, message: str, *, status: int | None = None, lost: bool = False) -> None:
        super().__init__(message)
        self.status, self.lost = status, lost


class Stopped(Exception):
    """A signal asked the run to stop and a checkpoint was saved: exit code 75, "run me again"."""
