"""Reads what a client sent, and refuses it in one line."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from mrl.errors import UserError

T = TypeVar("T")
_KINDS: dict[type, str] = {
    str: "a text", int: "a whole number", float: "a number", bool: "true or false", dict: "an object", list: "a list",
}  # fmt: skip
_MISSING: Any = object()
MAX_NUMBER = 2**63 - 1
MAX_SECONDS = 10 * 365 * 24 * 3600
MAX_NUMBERS = 2**24
"""Numbers that a few bytes of a request may make: log-probs of an answer, or sparse tensors of a call."""


class RequestError(Exception):
    """A request that is answered by a status and one line.

    A client raises at 400 to 404 and 422. At 408, 409, 429 and 5xx it comes again.
    """

    def __init__(self, status: int, line: str) -> None:
        super().__init__(line)
        self.status, self.line = status, line


def parse_body(body: bytes) -> dict[str, Any]:
    """Returns the JSON object of a body. Raises RequestError."""
    if not body:
        return {}
    try:
        found = json.loads(body.decode())
        if b"\\u" in body:
            json.dumps(found, ensure_ascii=False).encode()  # ValueError at half of a UTF-16 pair
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RequestError(400, "the body is no JSON object of UTF-8")
    return found


def field(body: Mapping[str, Any], name: str, kind: type[T], default: Any = _MISSING) -> T:
    """Returns a field of a body, of the given kind; null counts as absent. Raises UserError."""
    value: Any = body.get(name)
    if value is None:
        if default is _MISSING:
            raise UserError(name, why="is missing", fix=f"give {_KINDS[kind]}")
        return default
    if kind is float and type(value) is int and abs(value) < 2**53:
        value = float(value)
    if type(value) is not kind:
        raise UserError(name, value, f"is not {_KINDS[kind]}", "give one")
    found: Any = value
    if kind is float and not math.isfinite(found):
        raise UserError(name, found, "is not finite", "give a finite number")
    if kind is int and abs(found) > MAX_NUMBER:
        raise UserError(name, found, "is out of range", "give a smaller number")
    return found


def number(body: Mapping[str, Any], name: str, default: Any = _MISSING, *, least: int = 0) -> int:
    """Returns a whole number of at least `least`. Raises UserError."""
    value = field(body, name, int, default)
    if value is not default and value < least:
        raise UserError(name, value, f"is below {least}", f"give at least {least}")
    return value


def check_numbers(name: str, count: int, most: int = MAX_NUMBERS) -> None:
    """Raises UserError if a field makes more than `most` numbers."""
    if count > most:
        raise UserError(name, why=f"makes {count} numbers", fix=f"keep to {most}")


def refuse_fields(body: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raises UserError if a body asks for something that this server does not do."""
    for name in names:
        if body.get(name):
            raise UserError(name, why="is not done by this server", fix="leave it out")


def seed_of(body: Mapping[str, Any]) -> int:
    """Returns the seed of a sample, a random one if the body has none. Raises UserError."""
    seed = field(body, "seed", int, None)
    return secrets.randbits(62) if seed is None else seed


def is_ids(values: Sequence[Any]) -> bool:
    """Returns whether these are token ids, of whatever vocabulary."""
    return all(type(id) is int and abs(id) < 2**31 for id in values)


def seconds_of(body: Mapping[str, Any]) -> int | None:
    """Returns for how long something is to be kept; None is for ever. Raises UserError."""
    seconds = field(body, "ttl_seconds", int, None)
    if seconds is not None and not 1 <= seconds <= MAX_SECONDS:
        raise UserError("ttl_seconds", seconds, "is out of range", f"give 1 to {MAX_SECONDS}, or null for ever")
    return seconds


def metadata_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metadata that a client wants remembered. Every list shows it. Raises UserError."""
    metadata = field(body, "user_metadata", dict, {})
    if not all(isinstance(value, str) for value in metadata.values()):
        raise UserError("user_metadata", why="has a value that is no text", fix="give texts")
    return metadata
