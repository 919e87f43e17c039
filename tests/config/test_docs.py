"""The key reference is complete and current."""

from __future__ import annotations

import pathlib
import re

from mrl.config.command import own_names, roots
from mrl.config.docs import default_text, sections, text
from mrl.config.keys import accepted_values, walk_keys
from tools import pages


def test_the_file_is_current():
    path = pathlib.Path(__file__).parents[2] / "docs" / "config.md"
    assert path.read_text(encoding="utf-8") == pages.config(), "run `make docs`"


def test_every_key_is_on_the_terminal():
    for root in roots().values():
        lines = text(root)
        for key in walk_keys(root):
            assert f"\n  {key.path}  (" in lines
            assert key.help in lines


def test_the_page_has_each_key_of_each_command_in_the_table_that_its_section_is_linked_to():
    page = pages.config()
    tables = dict(re.findall(r"^## ([^\n]+)\n\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    for command in own_names():
        if command not in roots():
            continue
        linked = dict(re.findall(r"^\| `([\w.]+)` \| \[([\w.]+)\]", tables[f"mrl {command}"], re.MULTILINE))
        headings = {"": "Top level"}
        for path, _, _, keys in sections(roots()[command]):
            above, _, name = path.rpartition(".")
            heading = headings.setdefault(path, linked.get(path) or f"{headings[above]}.{name}")
            for key in keys:
                row = key.path if not path else f"{heading}.{key.path.rpartition('.')[2]}"
                start = f"| `{row}` | {accepted_values(key.annotation, key.stated)} | `{default_text(key)}` | "
                own = [line for line in tables[heading].splitlines() if line.startswith(start)]
                places = [re.match(r"In (`.*?`): ", line.removeprefix(start)) for line in own]
                here = f"`mrl {command}`" if path in ("", heading) else f"`{path}`"
                assert any(place is None or here in place[1].split(", ") for place in places), (command, key.path)


def test_no_row_stands_twice():
    rows = [line for line in pages.config().split("\n## Top level\n")[1].splitlines() if line.startswith("| `")]
    assert len(rows) == len(set(rows))
