"""Processes that believe in a GPU: each starts once (10 s) for all files of a test process."""

import pytest

from tests.cuda.worker import Worker


@pytest.fixture(scope="session")
def worker():
    with Worker() as worker:
        yield worker


@pytest.fixture(scope="session")
def te_worker():
    with Worker(te=True) as worker:
        yield worker
