"""Reads foreign/*.txt, the tables of keys of verl, NeMo-RL and TRL with ours for them.

A table is text. A line that begins with blanks continues the one before, and `#` begins a comment. A row is

    THEIRS -> OURS OURS | values V=W V | default V | when KEY | on KEY | times KEY | of COMMAND | part | note TEXT

No key of ours means that nothing here stands for theirs. `a.{b c}.d` stands for `a.b.d` and `a.c.d`. `Row` has the
meaning of each part. A value is JSON, or else text. `V` alone is `V=V`, and `*` is any other value. The words `unset`,
`by_hand` and `same` for ours mean: write nothing, tell the user to set it, keep the value.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

FOLDER = pathlib.Path(__file__).parent / "foreign"
_WORDS: Mapping[str, Any] = {"unset": None, "by_hand": KeyError, "same": ...}


@dataclasses.dataclass(frozen=True)
class Row:
    """One key of another trainer."""

    theirs: str
    ours: tuple[str, ...]  # () where nothing here stands for it; `actor.` is put before it where ours is a role's
    note: str = ""  # the change of unit or meaning
    values: Mapping[Any, Any] = dataclasses.field(default_factory=dict)
    """Theirs -> ours, "*" for any other: None where nothing needs to be written, KeyError where it cannot be told, ...
    where the value is kept. Without entries it is kept."""
    times: str = ""  # their key of a number that the value is multiplied with, as prompts are with samples
    when: str = ""  # their key that has to be true, or, after `not `, false, for this one to mean anything
    on: str = ""  # their key that is true unless the file says otherwise, and has to be
    default: Any = None  # theirs where the file has none, written out where ours differs
    part: bool = False  # theirs is a part of ours, which is told by hand as a whole if a part before it is
    of: tuple[str, ...] = ()  # commands of ours that it is for; () for all


@dataclasses.dataclass(frozen=True)
class Trainer:
    name: str
    source: str  # what was read for it, with the version
    sections: tuple[str, ...]  # top-level keys that only its configs have
    begins: tuple[str, ...]  # beginnings of dotted keys in sections that ours have too, which only its configs have
    rows: tuple[Row, ...]


@functools.cache
def read_table(name: str) -> Trainer:
    """Returns the table foreign/NAME.txt."""
    text = re.sub(r"\n +", " ", (FOLDER / f"{name}.txt").read_text(encoding="utf-8"))
    head = {"name": "", "source": "", "sections": "", "begins": ""}
    rows: list[Row] = []
    for line in text.splitlines():
        theirs, arrow, rest = line.partition(" ->")
        if arrow:
            rows += _rows(theirs, rest)
        elif line and not line.startswith("#"):
            field, _, value = line.partition(":")
            head[field] = value.strip()
    begins, sections = head["begins"].split(), head["sections"].split()
    return Trainer(head["name"], head["source"], tuple(sections), tuple(begins), tuple(rows))


def _rows(theirs: str, rest: str) -> list[Row]:
    """Returns the rows of a line, one for each of their names."""
    ours, *parts = rest.split(" | ")
    about: dict[str, Any] = {}
    for part in parts:
        name, _, value = part.partition(" ")
        about[name] = value
    if "values" in about:
        about["values"] = dict(_pair(pair) for pair in about["values"].split())
    if "default" in about:
        about["default"] = _scalar(about["default"])
    about["part"] = "part" in about
    if "of" in about:
        about["of"] = tuple(about["of"].split())
    before, _, inside = theirs.partition("{")
    names, _, after = inside.partition("}")
    return [Row(f"{before}{name}{after}", tuple(ours.split()), **about) for name in names.split() or [""]]


def _pair(text: str) -> tuple[Any, Any]:
    """Returns a value of theirs and what it is here, from `V=W` or `V`."""
    theirs, equals, ours = text.partition("=")
    if not equals:
        return _scalar(theirs), _scalar(theirs)
    return _scalar(theirs), _WORDS[ours] if ours in _WORDS else _scalar(ours)


def _scalar(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
