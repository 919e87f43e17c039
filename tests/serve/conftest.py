"""The model that the servers of these tests serve, and the server that most of them talk to."""

import pytest

from tests.serve.serving import make_model, serving


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def one(model, tmp_path_factory):
    """One process, which lets few calls wait and takes small bodies."""
    with serving(tmp_path_factory.mktemp("one"), model, "serve.max_waiting=64", "serve.max_body_mb=1") as server:
        yield server
