"""Worlds of test processes end with the session; tiny models and their references are made once in it."""

import pytest

from tests.engine import harness, tiny


@pytest.fixture(scope="session", autouse=True)
def worlds():
    yield harness.run_world
    harness.close_worlds()


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
