"""Worlds of test processes end with the session."""

import pytest

from tests.engine import harness


@pytest.fixture(scope="session", autouse=True)
def worlds():
    yield harness.run_world
    harness.close_worlds()
