"""The split in a file's name, and files in both data.train and data.eval.

A name says that a file is held out by a word between separators: `gsm_test.jsonl`, `val-00000.parquet`, `dev/a.jsonl`.
Such a file does not train beside another one because a folder or a glob happens to bring it in.
"""

from __future__ import annotations

import dataclasses
import glob
import os
import re
from collections.abc import Mapping, Sequence

from mrl.config.urls import shown_url
from mrl.data.files import SUFFIXES
from mrl.errors import DataError

_HELD_OUT = re.compile(
    r"(?<![^\W\d_])((?:test|eval|dev|val|valid)(?:s|set)?|testing|evaluation|validation|(?:held|hold)[-_ ]?out)"
    r"(?![^\W\d_])",
    re.IGNORECASE,
)
_CAMEL_CASE = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z0-9])(?=[A-Z][a-z])")  # trainData, GSMTest, GSM8KTest


@dataclasses.dataclass(frozen=True)
class NamedFiles:
    """The files that one path of the config stands for."""

    key: str  # of the config: data.train
    path: str  # as it is shown
    files: Sequence[str]
    pattern: str  # what of the path chose among files: of a glob what follows its folder; "" of a folder
    is_chosen: bool  # whether the path names these rows alone: one file, a saved data set, a split of a hub id


def files_of_path(key: str, path: str, files: Sequence[str]) -> NamedFiles:
    """Returns the files of a path or URL that is no saved data set and no hub id."""
    shown = shown_url(path)
    local = os.path.expanduser(path)
    is_file = os.path.isfile(local) or ("://" in path and len(files) == 1 and shown.endswith(SUFFIXES))
    if is_file and not (glob.has_magic(shown) and "://" in path):
        return NamedFiles(key, shown, files, shown, is_chosen=True)
    parts = shown.split("/")
    first = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    return NamedFiles(key, shown, files, "/".join(parts[first:]), is_chosen=False)


def check_splits(every: Sequence[NamedFiles]) -> None:
    """Raises DataError if a path brings in a held-out file beside others. every: paths that are read together."""
    for one in every:
        chosen = _kinds(one.pattern)
        by_name = chosen | _kinds(os.path.basename(one.path.rstrip("/")))
        first = _first_of_each_kind(one.files)
        elsewhere = next((other for another in every if another is not one for other in another.files), None)
        for kinds, file in first.items():
            beside = next((other for of_other, other in first.items() if of_other != kinds), None)
            if beside is not None and not kinds <= chosen:
                raise _several(one, file, beside)
            if elsewhere is not None and not kinds <= by_name:
                raise _several(one, file, elsewhere)


def _kinds(text: str) -> frozenset[str]:
    """Returns the words of a text that hold it out, by their first letter: `val` and `validation` are one."""
    return frozenset(word[0].lower() for word in _HELD_OUT.findall(_CAMEL_CASE.sub("_", text)))


def _first_of_each_kind(files: Sequence[str]) -> Mapping[frozenset[str], str]:
    """Returns the first file of each set of kinds, from the words of its path below the common folder."""
    root = os.path.commonprefix(list(files)).rpartition("/")[0]
    first: dict[frozenset[str], str] = {}
    for file in files:
        first.setdefault(_kinds(file.removeprefix(root)), file)
    return first


def _several(one: NamedFiles, held_out: str, other: str) -> DataError:
    why = f"{one.path}: stands for several splits ({other}, {held_out})"
    return DataError(one.key, why=why, fix="name the files that are meant, or give a glob with the word of their split")


def check_apart(train: Sequence[NamedFiles], evaluation: Sequence[NamedFiles]) -> list[str]:
    """Returns a line for each file that both data.train and data.eval name. Raises DataError where a folder or a glob
    brought it in."""
    of_train = {_identity(file): one for one in train for file in one.files}
    lines = []
    for one in evaluation:
        for file in one.files:
            other = of_train.get(_identity(file))
            if other is None:
                continue
            if one.is_chosen and other.is_chosen:
                lines.append(f"{one.key}: {file} is in {other.key} too: the evaluation is of rows that train")
                continue
            brings = other if one.is_chosen else one
            raise DataError(
                one.key,
                why=f"{file} is in {other.key} too, and {brings.path} is no name of it alone",
                fix=f"give {brings.key} a glob or a list without it, or name it in both to evaluate on rows that train",
            )
    return lines


def _identity(file: str) -> str:
    return file if "://" in file else os.path.realpath(file)
