"""Inputs of all tests here, made once in a session, and runs that nothing happened to, made once a layout."""

import functools

import pytest

from tests.resume import runs


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    return runs.make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="session")
def unharmed(inputs, tmp_path_factory):
    """Name of a layout -> the folder of a whole run in it. It is made in waiting processes, which start no command: what
    the command line makes of the same config is that to the bit (test_kill.py)."""

    @functools.cache
    def of(name):
        layout, output = runs.LAYOUTS[name], tmp_path_factory.mktemp("unharmed") / "run"
        runs.finish(runs.make_config(inputs, output, layout), layout.world)
        return output

    return of
