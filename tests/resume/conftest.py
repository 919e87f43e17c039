"""Inputs of all tests here, made once in a session, and runs that nothing happened to, made once a layout."""

import pytest

from tests.resume import runs


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    return runs.make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="session")
def unharmed(inputs, tmp_path_factory):
    """Name of a layout -> the folder of a whole run in it, through the command line."""
    made = {}

    def of(name):
        if name not in made:
            run = runs.new_run(tmp_path_factory.mktemp("unharmed"), inputs, runs.LAYOUTS[name])
            run.to_the_end()
            made[name] = run.output
        return made[name]

    return of
