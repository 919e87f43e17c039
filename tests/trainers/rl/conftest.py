"""The models and prompts of all tests of the RL trainer, made once in a session."""

import pytest

from tests.trainers.rl import kit


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rl-inputs")
    kit.make_inputs(folder)
    return folder
