"""URLs as they are shown and kept: what comes after `?` may be a signature, which lets its holder read the file.

It stands in the config of the run alone, which the run is started with again: not in checkpoints, on wandb's page or in
messages. Two URLs that differ in it name the same file.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

HIDDEN = "?(hidden)"
_STARTS = ("http://", "https://")
_IN_TEXT = re.compile(r"(https?://[^\s?]+)\?\S*?(?=['\"]?(?:\s|$))")


def shown_url(url: str) -> str:
    """Returns a URL of http, or one that reads through it (`zip://a.jsonl::https://...`), up to its `?`.

    Other texts stay as they are, because `?` is of a glob there.
    """
    return url.partition("?")[0] if any(start in url for start in _STARTS) else url


def is_signed(url: str) -> bool:
    """Returns whether something of a URL is not shown."""
    return shown_url(url) != url


def without_queries(plain: Any) -> Any:
    """Returns plain data, or a text, in which URLs of http have `HIDDEN` for what comes after `?`.

    A string that begins as a URL is one, to its end: a signature may hold commas, brackets and quotes. Within another
    text a URL ends at a blank, so that what is written right behind one is hidden with it.
    """

    def hidden(text: str) -> str:
        if not text.startswith(_STARTS):
            return _IN_TEXT.sub(rf"\1{HIDDEN}", text)
        address, mark, _ = text.partition("?")
        return address + HIDDEN if mark else text

    return _of_texts(plain, hidden)


def without_signatures(plain: Any) -> Any:
    """Returns plain data with `HIDDEN` for what comes after `?` of values that are URLs, as a path of rows.

    A text with a URL in it stays as it is, because with another query it is another text.
    """

    def hidden(text: str) -> str:
        is_url = is_signed(text) and not re.search(r"\s", text)
        return shown_url(text) + HIDDEN if is_url else text

    return _of_texts(plain, hidden)


def _of_texts(plain: Any, change: Callable[[str], str]) -> Any:
    """Returns plain data with each text changed."""
    if isinstance(plain, str):
        return change(plain)
    if isinstance(plain, Mapping):
        return {name: _of_texts(value, change) for name, value in plain.items()}
    return [_of_texts(value, change) for value in plain] if isinstance(plain, list | tuple) else plain


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a new file with a config or a command in it.

    A URL with a signature lets its reader read the rows. So a file with one is its owner's alone from the start.
    """
    path.unlink(missing_ok=True)  # one that is there keeps its mode, and may be open elsewhere
    mode = 0o666 if without_queries(text) == text else 0o600
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
        file.write(text)
