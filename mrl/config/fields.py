"""Declares a key of the schema: its default, meaning and bounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

REQUIRED: Any = dataclasses.MISSING

MAX_DEGREE = 2**16
"""Ranks that one degree of parallelism may have, and ranks of an adapter: more than any machine or matrix has."""

MAX_SEQUENCES = 10**7
"""Sequences of a batch: what a run holds of it on the host would take hundreds of gigabytes with more."""

MAX_SECONDS = 1e6
"""Longest wait, some eleven days: the system calls that wait take milliseconds as a 32-bit number."""


def key(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    parse: Callable[[Any, str], Any] | None = None,
    may_change: bool | frozenset[str] = False,
    moves: bool = False,
    long_rows: bool = False,
) -> Any:
    """Returns a config key with its default (REQUIRED for none), meaning, and numeric bounds.

    - minimum, above, maximum: `above` is exclusive. Without any, `mrl.config.keys.MAX_VALUES` holds.
    - parse: `(plain data, dotted path) -> section`, for a section that dataclasses alone do not describe.
    - may_change: a resumed run may have another value. For a section this holds for all of its keys. For a mapping it
      is the names of the entries that may change. Model and data stay the same.
    - moves: it may name another place. The run compares the content with the data of the checkpoint.
    - long_rows: it says what becomes of long rows, and may change while no row was long (`mrl.config.resume`).
    """
    metadata = {
        "help": help, "minimum": minimum, "above": above, "maximum": maximum, "parse": parse,
        "may_change": may_change or moves, "moves": moves, "long_rows": long_rows,
    }  # fmt: skip
    if default is REQUIRED:
        return dataclasses.field(metadata=metadata)
    if isinstance(default, type):  # a nested section
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
