"""Worlds of test processes, and the inputs of all trainer tests, made once in a session."""

import pytest

from tests.engine import harness
from tests.trainers import tiny_runs


@pytest.fixture(scope="session", autouse=True)
def worlds():
    yield harness.run_world
    harness.close_worlds()


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    tiny_runs.make_inputs(folder)
    return folder
