"""The order of tests: those of a real Slurm wait for most of their time, and come first, so that others fill it."""


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: not item.nodeid.startswith("tests/slurm/"))
