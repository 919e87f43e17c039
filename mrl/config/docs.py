"""The reference of every config key as text (`mrl config`); tools/pages.py makes docs/config.md of the same."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mrl.config import command as commands
from mrl.config.keys import Key, accepted_values, section_keys, walk_keys
from mrl.errors import ConfigError


def default_text(key: Key) -> str:
    """Returns the default as YAML would write it; `required` where there is none."""
    if key.required:
        return "required"
    if key.path.endswith("optimizer.lr"):
        return "by command"
    return _yaml(key.default)


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    return json.dumps(value) if value == "\n" else str(value)  # a line break would end a table's row


class Section(NamedTuple):
    """A section of a command's config."""

    path: str  # dotted; "" at the top
    help: str
    of: type
    keys: list[Key]  # those that hold a value


def sections(section: type, path: str = "", help: str = "keys outside of any section") -> Iterator[Section]:
    """Yields `section` and each section with keys below it, also if it is null."""
    keys = section_keys(section, path)
    if plain := [key for key in keys if key.section is None]:
        yield Section(path, help, section, plain)
    for key in keys:
        if key.section is not None:
            yield from sections(key.section, key.path, f"{key.help} (default null)" if key.nullable else key.help)


def config_text(names: Sequence[str], wanted: str | None) -> str:
    """Returns what `mrl config NAMES --grep WANTED` prints. names: a command, a section or key, both, or none.

    Raises ConfigError if nothing has that name or text.
    """
    roots = commands.roots()
    looked = list(roots) if names or wanted else ["sft"]
    if names and names[0] in roots:
        looked, names = [names[0]], names[1:]
    part = ".".join(names)
    found = {command: text(roots[command], part, wanted) for command in looked}
    found = {command: keys for command, keys in found.items() if keys.strip()}
    if len(set(found.values())) > 1:
        return "\n".join(f"== mrl {command} ==\n\n{keys}" for command, keys in found.items())
    if found:
        return next(iter(found.values()))
    there = dict.fromkeys(key.path for command in looked for key in walk_keys(roots[command], sections=True))
    close = difflib.get_close_matches(part, there, n=1, cutoff=0.5)
    advice = f"did you mean {close[0]}?" if close else f"sections are {', '.join(p for p in there if '.' not in p)}"
    what = f"no section or key {part or 'at all'}" + (f" with the text {wanted!r}" if wanted is not None else "")
    raise ConfigError("mrl config", why=f"mrl {' or '.join(looked)} has {what}", fix=advice)


def text(root: type, part: str = "", wanted: str | None = None) -> str:
    """Returns keys for a terminal: default and type on one line, the meaning below.

    part: a section or key, by its dotted name; only this is returned. wanted: text in a key's name or meaning.
    """
    lines: list[str] = []
    for path, help, _, keys in sections(root):
        if part:
            keys = [key for key in keys if f"{key.path}.".startswith(f"{part}.")]
        if wanted is not None:
            keys = [key for key in keys if wanted.lower() in f"{key.path}\n{key.help}".lower()]
        if not keys:
            continue
        lines += [f"{path}: {help}" if path else "top level", ""]
        for key in keys:
            default = "required" if key.required else f"default {default_text(key)}"
            lines += [f"  {key.path}  ({default}; {accepted_values(key.annotation, key.stated)})", f"      {key.help}"]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"
