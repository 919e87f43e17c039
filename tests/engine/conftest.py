"""Tiny models, and the parity table, each made once in a module."""

import pytest

from tests.engine import tiny
from tests.engine.parity import Table


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder of a tiny model, by family and fields; each is made once."""
    made = {}

    def of(family="llama", **fields):
        key = (family, *sorted(fields.items()))
        if key not in made:
            made[key] = tiny.make_model(str(tmp_path_factory.mktemp(family)), family, **fields)
        return made[key]

    return of


@pytest.fixture(scope="module")
def table() -> Table:
    return Table()
