"""The order of tests: those of a real Slurm wait for most of their time, and come first, so that others fill it. And none
fails for being slow: hypothesis would end an example after 200 ms, which a machine with other work on it may take. Worlds of
test processes end with the session."""

import sys

import hypothesis
import pytest

hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

TOGETHER = {"tests/rollout/test_handover.py": "tests/rollout/test_vllm.py"}
"""Files that are one process's work with another file, whose servers they share."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """`--dist loadfile`, with files of TOGETHER beside the other ones."""
    from xdist.scheduler import LoadFileScheduling  # which is here where this is called

    class ByServers(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return TOGETHER.get(file, file)

    return ByServers(config, log)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: not item.nodeid.startswith("tests/slurm/"))


def pytest_sessionfinish():
    harness = sys.modules.get("tests.engine.harness")  # where no test has imported it, there is no world
    if harness is not None:
        harness.close_worlds()
