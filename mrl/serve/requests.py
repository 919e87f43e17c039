"""Reads what a client sent, and refuses it in one line."""

from __future__ import annotations

import marshal
import math
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from mrl.errors import UserError
from mrl.serve import parse_json

T = TypeVar("T")
_KINDS: dict[type, str] = {
    str: "a text", int: "a whole number", float: "a number", bool: "true or false", dict: "an object", list: "a list",
}  # fmt: skip
_MISSING: Any = object()
MAX_NUMBER = 2**63 - 1
MAX_SECONDS = 10 * 365 * 24 * 3600
MAX_METADATA = 16384
SMALL_BYTES = 2**20
"""A longer body is parsed in a process of its own."""


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
    status, found = parse_json.parse_body_json(body) if len(body) <= SMALL_BYTES else _parsed_apart(body)
    if status != 200:
        raise RequestError(status, str(found))
    if not isinstance(found, dict):
        raise RequestError(400, "the body is no JSON object")
    return found


def _parsed_apart(body: bytes) -> tuple[int, Any]:
    """Calls `parse_body_json` in a process of its own."""
    with tempfile.TemporaryFile() as file:
        file.write(body)
        file.seek(0)
        command = [sys.executable, "-I", "-S", parse_json.__file__]
        done = subprocess.run(command, stdin=file, stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:  # it was killed, as where memory runs out
        return 413, "the body takes too much memory to parse"
    answer: tuple[int, Any] = marshal.loads(done.stdout)
    return answer


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
    if kind is str and not is_utf8(found):
        raise UserError(name, found, "has characters that are none", "give UTF-8")
    return found


def number(body: Mapping[str, Any], name: str, default: Any = _MISSING, *, least: int = 0) -> int:
    """Returns a whole number of at least `least`. Raises UserError."""
    value = field(body, name, int, default)
    if value is not default and value < least:
        raise UserError(name, value, f"is below {least}", f"give at least {least}")
    return value


def refuse_fields(body: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raises UserError if a body asks for something that this server does not do."""
    for name in names:
        if body.get(name):
            raise UserError(name, why="is not done by this server", fix="leave it out")


def seed_of(body: Mapping[str, Any]) -> int:
    """Returns the seed of a sample, a random one if the body has none. Raises UserError."""
    seed = field(body, "seed", int, None)
    return secrets.randbits(62) if seed is None else seed


def is_utf8(text: str) -> bool:
    """Returns whether a text can be written: JSON may escape halves of characters."""
    try:
        text.encode()
    except UnicodeError:
        return False
    return True


def seconds_of(body: Mapping[str, Any]) -> int | None:
    """Returns for how long something is to be kept; None is for ever. Raises UserError."""
    seconds = field(body, "ttl_seconds", int, None)
    if seconds is not None and not 1 <= seconds <= MAX_SECONDS:
        raise UserError("ttl_seconds", seconds, "is out of range", f"give 1 to {MAX_SECONDS}, or null for ever")
    return seconds


def metadata_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metadata that a client wants remembered. Every list shows it. Raises UserError."""
    metadata = field(body, "user_metadata", dict, {})
    texts = [*metadata, *metadata.values()]
    if not all(isinstance(text, str) and is_utf8(text) for text in texts):
        raise UserError("user_metadata", why="has a value that is no text", fix="give texts of UTF-8")
    if sum(map(len, texts)) > MAX_METADATA:
        raise UserError("user_metadata", why="is too long", fix=f"give at most {MAX_METADATA} characters")
    return metadata
