"""A private Slurm, started once for the tests that submit, and what they train on."""

import os
import warnings

import pytest

from tests.resume import runs
from tests.slurm import cluster, slurm_site


@pytest.fixture(autouse=True, scope="session")
def clean_environment():
    slurm_site.clean_environment()


@pytest.fixture(scope="session")
def running_cluster(tmp_path_factory):
    """The cluster and its user; Slurm's commands of this process talk to it."""
    if (reason := cluster.missing()) is not None:
        warnings.warn(f"the tests on a real Slurm are skipped: {reason}", stacklevel=1)  # a line in every report
        pytest.skip(reason)
    with cluster.running(tmp_path_factory.mktemp("cluster")) as running:
        before = dict(os.environ)
        os.environ.update(running.environ)
        yield running
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def site(running_cluster, tmp_path):
    """A user in a folder of their own; no job of theirs is left."""
    made = slurm_site.Site(running_cluster, tmp_path)
    yield made
    made.run("scancel", "--me")
    running_cluster.wait_for_idle()


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs") / "with a space"
    folder.mkdir()
    return runs.make_inputs(folder)
