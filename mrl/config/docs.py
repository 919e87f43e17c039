"""The reference of every config key, as markdown (docs/config.md) and as text (`mrl config`).

`python -m mrl.config.docs > docs/config.md` brings the file up to date; a test compares them.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from mrl.config import command as commands
from mrl.config.keys import Key, expected, section_keys, walk
from mrl.config.rates import table
from mrl.errors import ConfigError

_HEADER = """\
# Config keys

    mrl sft config.yaml train.steps=10 data.columns='{{question: prompt}}'   # any key over the file's, in YAML
    mrl config ppo rollout                # the keys of a command, or of a section, on the terminal
    mrl config --grep clip                # those whose name or meaning has a text
    mrl sft config.yaml --dry-run         # check them all, start nothing

Keys of {commands}, made from {files} by `make docs`.
Where no bound is given, a whole number may be up to 2147483647 and a number up to 1e9, and as far below
zero. An unknown key, a wrong type or keys that contradict each other stop the run before it starts, and so do missing
files, a layout that does not fit, an output_dir that is a model's folder, and an architecture in config.json that the
engine does not know: `--dry-run` checks these and starts nothing. So does what output_dir holds of another run. Weights
and what a checkpoint holds are read by the run, before its first step. A message names up to ten mistakes at once.
Keys of verl, NeMo-RL and TRL are told ours: [coming-from.md](coming-from.md).

Learning rates where a config gives none; a run prints them at its start and writes them to config.yaml:

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


def sections(section: type, path: str = "", help: str = "") -> Iterator[tuple[str, str, list[Key]]]:
    """(dotted path, meaning, keys that hold a value) of `section` and each section below it, also where it is null."""
    keys = list(section_keys(section, path))
    yield path, help, [key for key in keys if key.section is None]
    for key in keys:
        if key.section is not None:
            yield from sections(key.section, key.path, f"{key.help} (default null)" if key.nullable else key.help)


def markdown() -> str:
    """docs/config.md: the keys of mrl's own commands."""
    own = commands.training(commands.own_names())
    header = _HEADER.format(
        files=" and ".join(f"`{command.root.__module__.replace('.', '/')}.py`" for command in own),
        rates=table(),
        commands=" and of ".join(f"[mrl {command.name}](#mrl-{command.name})" for command in own),
    )
    return header + "".join(f"\n# mrl {command.name}\n\n{tables(command.root)}" for command in own)


def tables(root: type) -> str:
    """Returns the keys of one command, a table a section."""
    lines: list[str] = []
    for path, help, keys in sections(root):
        if not keys:
            continue
        lines += [f"## {path or 'Top level'}", ""]
        if help:
            lines += [_linked(help), ""]
        lines += ["| key | accepts | default | meaning |", "|---|---|---|---|"]
        for key in keys:
            cells = (f"`{key.path}`", expected(key.annotation, key.stated), f"`{default_text(key)}`", _linked(key.help))
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _linked(help: str) -> str:
    """Returns a key's meaning with links to the pages that it names."""
    return re.sub(r"\(docs/([\w-]+\.md)\)", r"([\1](\1))", help)


def asked(names: Sequence[str], wanted: str | None) -> str:
    """Returns what `mrl config NAMES --grep WANTED` prints. names: a command, a section or key, both, or none.

    Raises ConfigError where nothing is of that name or has that text.
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
    for path, help, keys in sections(root):
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
