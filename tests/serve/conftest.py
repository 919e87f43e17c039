"""The model that the servers of these tests serve."""

import pytest

from tests.serve.serving import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))
