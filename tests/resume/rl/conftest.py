"""Inputs of all tests here, made once, and runs that nothing happened to, made once each."""

import functools

import pytest

from tests.resume.rl import rl_runs


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    return rl_runs.make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="session")
def unharmed(inputs, tmp_path_factory):
    """Name of a run -> the folder of the whole of it."""

    @functools.cache
    def of(name):
        folder = tmp_path_factory.mktemp("unharmed") / "run"
        rl_runs.finish(rl_runs.make_config(inputs, folder, name), rl_runs.RUNS[name][0])
        return folder

    return of
