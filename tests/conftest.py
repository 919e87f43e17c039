"""The order of tests: those of a real Slurm wait for most of their time, and come first, so that others fill it. And none
fails for being slow: hypothesis would end an example after 200 ms, which a machine with other work on it may take. Worlds of
test processes end with the session.

What hypothesis draws is the same in each run, so that a change is not refused for an example that nobody had drawn before it.
`make test-nightly` draws anew."""

import os
import sys

import hypothesis
import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")  # for tests/kernels, before any test imports triton

hypothesis.settings.register_profile("repeat", deadline=None, derandomize=True)
hypothesis.settings.register_profile("nightly", deadline=None, derandomize=False, print_blob=True)
hypothesis.settings.load_profile("repeat")

TOGETHER = (
    ("tests/rollout/test_handover.py", "tests/rollout/test_vllm.py"),  # vLLM's servers
    ("tests/cuda/",),  # tests/cuda/worker.py, whose models lie on CUDA tensors without memory
    ("tests/plan/",),  # the same, of plans
    (
        "tests/bad_input/",
        "tests/serve/",
        "tests/rollout/test_adapters.py",
        "tests/commands/test_adding.py",
    ),  # tests/forks.py, and a vLLM for adapters
)
"""Files, by how their names begin, that one process runs together: they share what takes ten seconds or more to start."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Returns the scheduler of `--dist loadfile`, for which the files of a row of TOGETHER are one; None for xdist's own."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # which is here where this is called

    class ByWhatTheyShare(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return next((of[0] for of in TOGETHER if file.startswith(of)), file)

    return ByWhatTheyShare(config, log)


def pytest_addoption(parser):
    help = "of the tests in PATH, a beginning of node ids, only those marked `always` run (.ci/run)"
    parser.addoption("--unchanged", action="append", default=[], metavar="PATH", help=help)


def pytest_collection_modifyitems(config, items):
    unchanged = tuple(config.getoption("unchanged"))
    left_out = [i for i in items if i.nodeid.startswith(unchanged) and i.get_closest_marker("always") is None]
    if unchanged and left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: not item.nodeid.startswith("tests/slurm/"))


def pytest_sessionfinish():
    harness = sys.modules.get("tests.engine.harness")  # where no test has imported it, there is no world
    if harness is not None:
        harness.close_worlds()
    vllm = sys.modules.get("tests.rollout.real_vllm")
    if vllm is not None:
        vllm.end_adapter_server()
