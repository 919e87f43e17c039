"""The key reference is complete and current."""

from __future__ import annotations

import pathlib

from mrl.config.docs import markdown, text
from mrl.config.keys import walk
from mrl.config.schema import SFTConfig


def test_the_file_is_current():
    path = pathlib.Path(__file__).parents[2] / "docs" / "config.md"
    assert path.read_text(encoding="utf-8") == markdown(), "run `make docs`"


def test_every_key_is_in_both():
    for key in walk(SFTConfig):
        assert f"| `{key.path}` |" in markdown()
        assert f"\n  {key.path}  (" in text()
        assert key.help in text()
