"""The key reference is complete and current."""

from __future__ import annotations

import pathlib

from mrl.config.command import roots
from mrl.config.docs import markdown, tables, text
from mrl.config.keys import walk


def test_the_file_is_current():
    path = pathlib.Path(__file__).parents[2] / "docs" / "config.md"
    assert path.read_text(encoding="utf-8") == markdown(), "run `make docs`"


def test_every_key_is_in_both():
    for root in roots().values():
        table, lines = tables(root), text(root)
        for key in walk(root):
            assert f"| `{key.path}` |" in table
            assert f"\n  {key.path}  (" in lines
            assert key.help in lines
        assert table in markdown()
