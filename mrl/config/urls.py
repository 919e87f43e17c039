"""URLs as they are shown and kept: what comes after `?` may be a signature, which lets its holder read the file.

It stands in the config of the run alone, which the run is started with again: not in checkpoints, on wandb's page or in
messages. Two URLs that differ in it name the same file.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Mapping
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
    if isinstance(plain, str) and plain.startswith(_STARTS):
        address, mark, _ = plain.partition("?")
        return address + HIDDEN if mark else plain
    if isinstance(plain, str):
        return _IN_TEXT.sub(rf"\1{HIDDEN}", plain)
    if isinstance(plain, Mapping):
        return {name: without_queries(value) for name, value in plain.items()}
    if isinstance(plain, list | tuple):
        return [without_queries(value) for value in plain]
    return plain


def without_signatures(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config as plain data, with URLs up to their `?`: the paths of its rows, and values such as a server's.

    A text with a URL in it stays as it is, because with another query it is another text.
    """
    found = _urls_hidden(config)
    data = config.get("data")
    if not isinstance(data, Mapping):
        return found
    hidden = {part: _paths_hidden(data[part]) for part in ("train", "eval") if part in data}
    return {**found, "data": {**found["data"], **hidden}}


def _urls_hidden(plain: Any) -> Any:
    if isinstance(plain, Mapping):
        return {name: _urls_hidden(value) for name, value in plain.items()}
    if isinstance(plain, list | tuple):
        return [_urls_hidden(value) for value in plain]
    is_url = isinstance(plain, str) and plain.startswith(_STARTS) and not re.search(r"\s", plain)
    return without_queries(plain) if is_url else plain


def _paths_hidden(sources: Any) -> Any:
    """Returns data.train or data.eval with hidden paths: a path, or a list or mapping of paths and sections."""
    if isinstance(sources, str):
        return _path_hidden(sources)
    if isinstance(sources, Mapping):
        return {name: _path_hidden(source) for name, source in sources.items()}
    return sources if sources is None else [_path_hidden(source) for source in sources]


def _path_hidden(source: Any) -> Any:
    """Returns a path, or a section with one, up to its `?`. A URL ends a path, as in `zip://a.jsonl::https://...`."""
    if isinstance(source, Mapping) and "path" in source:
        return {**source, "path": _path_hidden(source["path"])}
    return shown_url(source) + HIDDEN if isinstance(source, str) and is_signed(source) else source


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a new file with a config or a command in it.

    A URL with a signature lets its reader read the rows. So a file with one is its owner's alone from the start.
    """
    path.unlink(missing_ok=True)  # one that is there keeps its mode, and may be open elsewhere
    mode = 0o666 if without_queries(text) == text else 0o600
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
        file.write(text)
