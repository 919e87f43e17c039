"""Reads from the schema what it says about each key, for error messages, docs and checks.

Nothing here knows any particular key.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

from mrl.errors import shortened

NUMBERS = (int, float)
MAX_NAMES = 15
"""Names in a message."""
MAX_VALUES = {int: 2**31 - 1, float: 1e9}
"""The largest value of a numeric key that states none, by its type; the smallest is the negative of it. A count that is
larger does not fit the 32-bit integers that kernels and files hold it in, and a number does not survive float32
arithmetic."""


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of the schema."""

    path: str  # dotted
    annotation: Any  # its type
    default: Any  # MISSING where the user must give it
    help: str
    stated: Mapping[str, float | None]  # a number's bounds in the schema
    parse: Callable[[Any, str], Any] | None = None  # (plain data, path) -> value, of a section with several forms
    may_change: bool | frozenset[str] = False  # as in `mrl.config.fields.key`
    moves: bool = False  # as in `mrl.config.fields.key`
    long_rows: bool = False  # as in `mrl.config.fields.key`

    @property
    def bounds(self) -> Mapping[str, float | None]:
        """The bounds that hold: the stated ones, or `MAX_VALUES`."""
        numbers = numbers_in(self.annotation)
        if not numbers:
            return self.stated
        most = MAX_VALUES[int if int in numbers else float]
        low, above, high = (self.stated[name] for name in ("minimum", "above", "maximum"))
        return {
            "minimum": -most if low is None and above is None else low,
            "above": above,
            "maximum": most if high is None else high,
        }

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def section(self) -> type | None:
        """The dataclass of a key with keys below it, also if it may be null; None for other keys."""
        return next(
            (arm for arm in arms_of(self.annotation) if isinstance(arm, type) and dataclasses.is_dataclass(arm)), None
        )

    @property
    def nullable(self) -> bool:
        return type(None) in arms_of(self.annotation)


def arms_of(annotation: Any) -> tuple[Any, ...]:
    """Returns the types of a union; of another type, itself."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def numbers_in(annotation: Any) -> set[type]:
    """Returns the types of number that a value of this type is or holds."""
    if annotation in NUMBERS:
        return {annotation}
    return {number for arm in typing.get_args(annotation) if arm is not Ellipsis for number in numbers_in(arm)}


@functools.cache
def types_of(section: type) -> dict[str, Any]:
    """Returns name -> type of the keys of one section, with string annotations resolved."""
    return typing.get_type_hints(section)


@functools.cache
def section_keys(section: type, path: str = "") -> tuple[Key, ...]:
    """Returns the keys directly in `section`, subsections among them; `path` is the section's own dotted path."""
    hints = types_of(section)
    keys: list[Key] = []
    for field in dataclasses.fields(section):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        dotted = join_key(path, field.name)
        stated = {name: field.metadata[name] for name in ("minimum", "above", "maximum")}
        about = {name: field.metadata[name] for name in ("help", "parse", "may_change", "moves", "long_rows")}
        keys.append(Key(path=dotted, annotation=hints[field.name], default=default, stated=stated, **about))
    return tuple(keys)


def walk_keys(section: type, path: str = "", *, sections: bool = False) -> Iterator[Key]:
    """Yields every key with a value below `section`, in the schema's order, also in sections that may be null.

    sections: the keys of sections too, each before what it holds.
    """
    for key in section_keys(section, path):
        if key.section is None or sections:
            yield key
        if key.section is not None:
            yield from walk_keys(key.section, key.path, sections=sections)


def join_key(path: str, name: object) -> str:
    """Returns the dotted key of a name in the section `path`, which is "" at the top level."""
    return f"{path}.{name}" if path else str(name)


def value_at(raw: Any, dotted: str) -> Any:
    """Returns what plain data, as YAML gives it, holds at a dotted key; None where it holds nothing there."""
    for name in dotted.split("."):
        raw = raw.get(name) if isinstance(raw, Mapping) else None
    return raw


def non_default_keys(section: Any, path: str) -> Iterator[tuple[Key, Any]]:
    """Yields keys below `section`, an object written at `path`, that do not hold their default, with what they hold.

    A section that is null by default and is not here is one key.
    """
    for key in section_keys(type(section), path):  # type: ignore[arg-type]  # mypy takes no class for hashable
        value = getattr(section, key.path.rsplit(".", 1)[-1])
        if key.section is not None and not key.nullable:
            yield from non_default_keys(value, key.path)
        elif value != key.default:
            yield key, value


def nearest_key(unknown: str, section: type, root: type, path: str) -> str | None:
    """Returns the dotted key that `unknown`, a name written in `section` at `path`, was most likely meant to be."""
    here = {key.path.rsplit(".", 1)[-1]: key.path for key in section_keys(section, path)}
    everywhere = {key.path.rsplit(".", 1)[-1]: key.path for key in reversed(list(walk_keys(root, sections=True)))}
    for names, cutoff in ((here, 0.6), (everywhere, 0.8)):
        close = difflib.get_close_matches(unknown, names, n=1, cutoff=cutoff)
        if close:
            return names[close[0]]
    return None


def join_names(names: Iterable[str]) -> str:
    """Returns names with commas between them; where they are too many for a message, how many more there are."""
    first, more = [shortened(name, 60) for name in names], 0
    if len(first) > MAX_NAMES:
        first, more = first[:MAX_NAMES], len(first) - MAX_NAMES
    return ", ".join(first) + (f" and {more} more" if more else "")


def value_kind(value: Any) -> str:
    """Returns what a value read from YAML is, in words."""
    for type_, words in (
        (type(None), "null"), (bool, "true or false"), (int, "a whole number"), (float, "a number"), (str, "text"),
        (list, "a list"), (Mapping, "a mapping"),
    ):  # fmt: skip
        if isinstance(value, type_):
            return words
    return f"a {type(value).__name__}"


def _bounds_in_words(bounds: Mapping[str, float | None]) -> str:
    words = [
        f"{prefix} {_number(bound)}"
        for name, prefix in (("minimum", "at least"), ("above", "above"), ("maximum", "at most"))
        if (bound := bounds.get(name)) is not None
    ]
    return (" of " if words and not words[0].startswith("above") else " ") + " and ".join(words) if words else ""


def _number(value: float) -> str:
    """Returns a number as people write it: 1e9, not 1000000000.0."""
    return str(value) if isinstance(value, int) or abs(value) < 1e6 else f"{value:g}".replace("e+0", "e")


def _list_in_words(element: Any) -> str:
    if typing.get_origin(element) is Literal:
        return f"a list with any of {', '.join(typing.get_args(element))}"
    words = {str: "texts", int: "whole numbers"}.get(element, getattr(element, "in_words", "mappings"))
    return f"a list of {words}"


def accepted_values(annotation: Any, bounds: Mapping[str, float | None] | None = None) -> str:
    """Returns what a key accepts, in words: `a whole number of at least 1, or null`."""
    bounds = bounds or {}
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is type(None):
        return "null"
    if origin is Literal:
        return args[0] if len(args) == 1 else "one of " + ", ".join(map(str, args))
    if origin in (typing.Union, types.UnionType):
        return ", or ".join(accepted_values(arm, bounds) for arm in args)
    if origin is tuple and args[-1] is Ellipsis:
        return _list_in_words(args[0])
    if origin is tuple:
        return f"a list of {len(args)} numbers"
    if origin in (dict, Mapping):
        return "a mapping of text to text" if args[1] is str else "a mapping"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[annotation]
    return words + (_bounds_in_words(bounds) if annotation in NUMBERS else "")
