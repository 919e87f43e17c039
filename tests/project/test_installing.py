"""What pages and messages say to install can be installed: no index has mrl."""

from __future__ import annotations

import pathlib

REPO = pathlib.Path(__file__).parents[2]


def test_nothing_names_an_extra_of_a_package_that_no_index_has():
    files = [*REPO.glob("*.md"), *REPO.glob("docs/**/*.md"), *REPO.glob("examples/**/*.md"), *REPO.glob("mrl/**/*.py")]
    found = [file.relative_to(REPO) for file in files if "mrl[" in file.read_text() and file.name != "CHANGELOG.md"]
    assert len(files) > 400 and found == []
