"""Reads JSON files, with one line for whatever can be wrong with them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mrl.errors import ModelError


def read_json(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises ModelError if it cannot be read or is no object."""
    try:
        content = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(file, why=f"not readable as JSON ({error})", fix="get the file again") from None
    if not isinstance(content, dict):
        raise ModelError(file, why=f"holds a JSON {type(content).__name__}, not an object", fix="get the file again")
    return content


def parse_json(text: bytes | str) -> Any:
    """Returns the value of a JSON text; ValueError if it is none, or nests too deep for Python."""
    try:
        return json.loads(text.decode() if isinstance(text, bytes) else text)  # of bytes it would guess the encoding
    except RecursionError:
        raise ValueError("it nests too deep") from None


def shorten_value(value: Any, most: int = 60) -> str:
    """Returns a value for a message: its first characters if it is a long one."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def plain_data(value: Any) -> Any:
    """Returns plain data; a number that is not finite is None, because JSON has no word for it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain_data(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain_data(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
