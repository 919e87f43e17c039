"""Inputs of all trainer tests, made once in a session."""

import pytest

from tests.trainers import tiny_runs


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    tiny_runs.make_inputs(folder)
    return folder
