"""The order of tests: those of a real Slurm wait for most of their time, and come first, so that others fill it. And none
fails for being slow: hypothesis would end an example after 200 ms, which a machine with other work on it may take. Worlds of
test processes end with the session."""

import sys

import hypothesis
import pytest

hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

TOGETHER = (
    ("tests/rollout/test_handover.py", "tests/rollout/test_vllm.py"),  # vLLM's servers
    ("tests/cuda/",),  # processes that believe in a GPU
    ("tests/plan/",),  # the one whose models have no memory
    ("tests/bad_input/", "tests/serve/", "tests/commands/test_adding.py"),  # the one that commands are forked from
)
"""Beginnings of files that are one process's work together, because of what takes ten seconds or more to start."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """`--dist loadfile`, where those of TOGETHER count as one file."""
    from xdist.scheduler import LoadFileScheduling  # which is here where this is called

    class ByWhatTheyShare(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return next((of[0] for of in TOGETHER if file.startswith(of)), file)

    return ByWhatTheyShare(config, log)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: not item.nodeid.startswith("tests/slurm/"))


def pytest_sessionfinish():
    harness = sys.modules.get("tests.engine.harness")  # where no test has imported it, there is no world
    if harness is not None:
        harness.close_worlds()
