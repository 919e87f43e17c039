"""URLs as they are shown and kept: what comes after `?` may be a signature, which lets its holder read the file.

It stands in the config of the run alone, which the run is started with again: not in checkpoints, on wandb's page or in
messages. Two URLs that differ in it name the same file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "?(hidden)"
_QUERY = re.compile(r"(https?://[^\s?'\"]+)\?[^\s'\",\]}]*")


def shown_url(url: str) -> str:
    """Returns a URL of http without what comes after `?`; other texts as they are (`?` is of a glob there)."""
    return url.partition("?")[0] if url.startswith(("http://", "https://")) else url


def is_signed(url: str) -> bool:
    """Returns whether something of a URL is not shown."""
    return shown_url(url) != url


def without_queries(plain: Any) -> Any:
    """Returns plain data, or a text, in which URLs of http have `HIDDEN` for what comes after `?`."""
    if isinstance(plain, str):
        return _QUERY.sub(rf"\1{HIDDEN}", plain)
    if isinstance(plain, Mapping):
        return {name: without_queries(value) for name, value in plain.items()}
    if isinstance(plain, list | tuple):
        return [without_queries(value) for value in plain]
    return plain
