"""The reference of every config key, as markdown (docs/config.md) and as text (`mrl config`).

`python -m mrl.config.docs > docs/config.md` brings the file up to date; a test compares them.
"""

from __future__ import annotations

import collections
import difflib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from mrl.config import command as commands
from mrl.config.keys import Key, expected, section_keys, walk
from mrl.config.rates import table
from mrl.errors import ConfigError

_HEADER = """\
# Config keys

This page has every key of {commands}: its values, default and meaning.
Read it to write a config, or when a message names a key that you do not know.

    mrl sft config.yaml train.steps=10 data.columns='{{question: prompt}}'   # override any key of the file, in YAML
    mrl config ppo rollout                # print the keys of a command, or of one section
    mrl config --grep clip                # print the keys whose name or meaning has a text
    mrl sft config.yaml --dry-run         # check all keys, start nothing

Each section has one table, because commands and roles share them. To find `actor.engine.recompute`, search for
`engine.recompute`. A meaning that begins with "In `mrl ppo`:" holds there alone. Each command also has the keys of
[Top level](#top-level).

- A number without a bound goes up to 1e9, a whole number up to 2147483647, and as far below zero.
- An unknown key, a wrong type or keys that contradict each other stop the run before it starts. One message names up
  to ten mistakes.
- `--dry-run` also finds missing files, a layout that does not fit, an unknown architecture in config.json, and an
  `output_dir` that is a model's folder or holds another run.
- The run itself reads weights and checkpoints, before its first step.
- Keys of verl, NeMo-RL and TRL: [coming-from.md](coming-from.md).

The default learning rate depends on the command. A run prints it at its start and writes it to config.yaml:

{rates}
"""


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
    """Yields `section` and the sections below it, null ones included. Those without keys of their own are skipped."""
    keys = section_keys(section, path)
    if plain := [key for key in keys if key.section is None]:
        yield Section(path, help, section, plain)
    for key in keys:
        if key.section is not None:
            yield from sections(key.section, key.path, f"{key.help} (default null)" if key.nullable else key.help)


def markdown() -> str:
    """Returns docs/config.md: a list of sections for each of mrl's own commands, and one table for sections alike."""
    found = {command.name: list(sections(command.root)) for command in commands.training(commands.own_names())}
    lists = ""
    tables: dict[str, list[tuple[str, Section]]] = collections.defaultdict(list)  # by heading, with the command
    for command, own in found.items():
        lists += f"\n## mrl {command}\n\n| section | table | meaning |\n|---|---|---|\n"
        headings = {section.path: heading_of(section, found.values()) for section in own}
        for section in own:
            heading = headings[section.path]
            tables[heading].append((command, section))
            above, _, name = section.path.rpartition(".")
            if section.path and (not above or heading != f"{headings.get(above)}.{name}"):  # else it is below `above`
                lists += f"| `{section.path}` | [{heading}](#{heading.replace('.', '')}) | {_cell(section.help)} |\n"
    names = ", ".join(f"[mrl {command}](#mrl-{command})" for command in found)
    return _HEADER.format(commands=names, rates=table()) + lists + "".join(map(_table, tables, tables.values()))


def heading_of(section: Section, found: Iterable[list[Section]]) -> str:
    """Returns the shortest path of a section alike, by default its own: `engine` for `critic.engine`.

    Sections are alike if the class of one is that of the other, or its base.
    """
    every = [other for own in found for other in own]
    alike = [one.path for one in every if issubclass(one.of, section.of) or issubclass(section.of, one.of)]
    return min([section.path, *alike], key=lambda path: path.count("."))


def _table(heading: str, alike: Sequence[tuple[str, Section]]) -> str:
    """Returns one table for sections that are alike. A row says where it holds, unless that is everywhere."""
    rows: dict[tuple[str, ...], list[str]] = collections.defaultdict(list)
    for command, section in alike:
        for key in section.keys:
            path = f"{heading}.{key.path.rpartition('.')[2]}".lstrip(".")
            cells = path, expected(key.annotation, key.stated), default_text(key), _cell(key.help)
            rows[cells].append(f"mrl {command}" if section.path == heading else section.path)
    text = f"\n## {heading or 'Top level'}\n\n{_cell(alike[0][1].help)}\n\n"
    text += "| key | accepts | default | meaning |\n|---|---|---|---|\n"
    order = list(dict.fromkeys(path for path, *_ in rows))
    for (path, accepts, default, help), places in sorted(rows.items(), key=lambda row: order.index(row[0][0])):
        only = "" if len(places) == len(alike) else f"In `{'`, `'.join(dict.fromkeys(places))}`: "
        text += f"| `{path}` | {accepts} | `{default}` | {only}{help} |\n"
    return text


def _cell(help: str) -> str:
    """Returns a key's meaning for a table, with links to the pages that it names."""
    return re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", help).replace("|", "\\|")


def asked(names: Sequence[str], wanted: str | None) -> str:
    """Returns what `mrl config NAMES --grep WANTED` prints. names: a command, a section or key, both, or none.

    Raises ConfigError if nothing has that name or text.
    """
    roots = commands.roots()
    looked = list(roots) if names or wanted else ["sft"]
    rest = names
    if names and names[0] in roots:
        looked, rest = [names[0]], names[1:]
    if len(rest) > 1:
        raise ConfigError(
            "mrl config", why=f"{' '.join(rest)} are several sections", fix=f"give one, as in mrl config {rest[0]}"
        )
    part = rest[0] if rest else ""
    found = {command: text(roots[command], part, wanted) for command in looked}
    found = {command: keys for command, keys in found.items() if keys.strip()}
    if len(set(found.values())) > 1:
        return "\n".join(f"== mrl {command} ==\n\n{keys}" for command, keys in found.items())
    if found:
        return next(iter(found.values()))
    there = dict.fromkeys(key.path for command in looked for key in walk(roots[command], sections=True))
    others = [c for c in roots if c not in looked and part in {key.path for key in walk(roots[c], sections=True)}]
    if part and part not in there and others:
        raise ConfigError("mrl config", why=f"{part} is of mrl {others[0]}", fix=f"write mrl config {others[0]} {part}")
    if part and part not in there:
        close = difflib.get_close_matches(part, there, n=1, cutoff=0.5) or [p for p in there if p.endswith(f".{part}")]
        advice = f"did you mean {close[0]}?" if close else f"sections are {', '.join(p for p in there if '.' not in p)}"
        raise ConfigError("mrl config", why=f"{part} is no section or key of mrl {' or '.join(looked)}", fix=advice)
    raise ConfigError("mrl config", why=f"no key has the text {wanted!r}", fix="--grep looks at names and meanings")


def text(root: type, part: str = "", wanted: str | None = None) -> str:
    """Returns keys for a terminal: default and type on one line, the meaning below.

    part: only the section or key of that dotted name. wanted: only keys with that text in name or meaning."""
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
            lines += [f"  {key.path}  ({default}; {expected(key.annotation, key.stated)})", f"      {key.help}"]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
