"""The models and prompts of all tests of the RL trainer, made once in a session."""

import pytest

from tests.trainers.rl import tiny_policies


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rl-inputs")
    tiny_policies.make_inputs(folder)
    return folder
