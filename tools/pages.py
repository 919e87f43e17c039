"""Prints pages and tables that are made from the code: `python tools/pages.py config|coming_from`.

`make docs` writes docs/config.md and docs/coming-from.md with it. Tests compare both.
"""

from __future__ import annotations

import collections
import pathlib
import re
import sys
from collections.abc import Iterable, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from mrl.config import command as commands
from mrl.config.docs import Section, default_text, sections
from mrl.config.keys import accepted_values, join_key
from mrl.config.load import RATES
from mrl.config.translate import Row, trainers

CONFIG_HEADER = """\
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

The default learning rate depends on the command. A run writes it to config.yaml:

{rates}
"""

COMING_FROM_HEADER = """\
# Coming from verl, NeMo-RL or TRL

This page lists the keys of these trainers next to the keys of mrl. You need it to bring a config of theirs.

    mrl config translate FILE > ours.yaml     # prints what it can translate; lists the rest and exits with 2
    mrl config translate FILE --as dpo        # names the command, if the file does not show it

FILE is a whole config: for verl and NeMo-RL the resolved one, as Hydra writes to `.hydra/config.yaml`; for TRL the YAML
of `--config`. The exit code is 0 if every key was translated, and keys and types of the result are valid. Check the
rest with `--dry-run`.

- mrl does not read their keys. If you write one, the error names ours.
- For `mrl ppo`, keys of `model`, `engine` and `optimizer` begin with `actor.`.
- The translation writes out their defaults if ours differ. GRPO differs most: verl and TRL aggregate by token_mean and
  take no KL. mrl follows the paper, with sequence_mean and a KL of 0.04 in the loss. verl also has a dual clip of 3.
- In the notes, "there" is the other trainer and "here" is mrl.
- Keys that mrl has nothing for are listed at the end of each section, first those with a hint.

`make docs` makes this page from the tables in `mrl/config/foreign/`.
"""


def config() -> str:
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
    header = CONFIG_HEADER.format(commands=names, rates=rates())
    return header + lists + "".join(map(_table, tables, tables.values()))


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
            cells = path, accepted_values(key.annotation, key.stated), default_text(key), _cell(key.help)
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


def rates() -> str:
    """Returns the rates of a config that gives none."""
    lines = ["| command | key | all weights | adapters | from |", "|---|---|---|---|---|"]
    for (command, role, adapters), (rate, source) in RATES.items():
        if not adapters:
            of_adapters, of = RATES[command, role, True]
            where = f"{source}; adapters: {of}"
            key = join_key(role, "optimizer.lr")
            lines.append(f"| `mrl {command}` | `{key}` | {rate:g} | {of_adapters:g} | {where} |")
    return "\n".join(lines)


def coming_from() -> str:
    """Returns docs/coming-from.md."""
    lines = [COMING_FROM_HEADER]
    for trainer in trainers():
        lines += [
            f"## {trainer.name}",
            "",
            f"The keys are those of {trainer.source}.",
            "",
            "| theirs | ours | note |",
            "|---|---|---|",
        ]
        for row in trainer.rows:
            if row.ours:
                notes = [row.note, _values_in_words(row), f"for {', '.join(row.of)}" if row.of else ""]
                ours = ", ".join(f"`{key}`" for key in row.ours)
                lines.append(f"| `{row.theirs}` | {ours} | {'; '.join(note for note in notes if note)} |")
        nowhere: dict[str, list[str]] = {}
        for row in trainer.rows:
            if not row.ours:
                nowhere.setdefault(row.note, []).append(f"`{row.theirs}`")
        plain = ", ".join(nowhere.pop("", []))
        lines += ["", "mrl has no key for these:", "", "| theirs | instead |", "|---|---|"]
        lines += [f"| {', '.join(names)} | {note} |" for note, names in nowhere.items()]
        lines += ["", f"mrl has nothing for these keys: {plain}.", ""]
    return "\n".join(lines)


def _values_in_words(row: Row) -> str:
    told = [
        f"{theirs} is {ours}" for theirs, ours in row.values.items() if isinstance(ours, str) and str(theirs) != ours
    ]
    return ", ".join(told).replace("True", "true").replace("False", "false")


if __name__ == "__main__":
    print({"config": config, "coming_from": coming_from}[sys.argv[1]](), end="")
