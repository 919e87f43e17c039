import pytest

from tests.cuda.worker import Worker


@pytest.fixture(scope="session")
def planner():
    """A process whose models have no memory; each call runs in a fork of it."""
    with Worker(plans=True) as worker:
        yield worker
