"""Two real processes that sum, and what is said of those that do not."""

import re

import pytest

from mrl.doctor import collectives
from tests.doctor.conftest import by_name, package


@pytest.mark.nightly
def test_two_processes_sum(monkeypatch):
    """As a rank of nothing: what a launcher left in the environment does not reach them."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("WORLD_SIZE", "64")
    found = by_name(collectives.section(1))
    assert found.keys() == {"collectives.gloo", "collectives.nccl"}, found
    gloo = found["collectives.gloo"]
    assert gloo.level == "ok" and re.fullmatch(
        r"gloo: two processes sum one number in [\d.]+ ms, 16 MiB in [\d.]+ ms \([\d.]+ [MGT]iB/s\)", gloo.what
    )
    small, large = (gloo.data["seconds_by_bytes"][size] for size in ("4", str(16 * 2**20)))
    assert 0 < small < large < 60


@pytest.mark.nightly
def test_an_interface_that_is_not_there(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no0")
    [found] = collectives.section(0)
    assert found.level == "fault" and "(joining the other)" in found.what and "no0" in found.what, found
    assert "GLOO_SOCKET_IFNAME" in found.fix


def test_processes_that_hang_are_ended_with_a_line(site):
    package(site, "torch", "import time\ntime.sleep(600)")
    [found] = collectives.section(0, limit_s=1.0)
    assert found.level == "fault"
    assert found.what == (
        "an all-reduce of two processes on this machine fails: rank 0 (before torch was imported) did not end within 1 s"
    )


@pytest.mark.nightly
def test_a_process_that_fails_is_quoted(site):
    """And not the other one, which waits for it."""
    text = "import os, time\nif os.environ['RANK'] == '0': time.sleep(600)\nraise RuntimeError('no such device')"
    package(site, "torch", text)
    [found] = collectives.section(0, limit_s=4.0)
    assert "rank 1 (before torch was imported) ended with exit code 1: RuntimeError: no such device" in found.what


def test_a_wrong_sum_is_an_error(monkeypatch):
    """What a broken NCCL gives, without an error of its own."""
    import torch

    from mrl.engine import collective

    monkeypatch.setattr(collective.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(collective.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(collective.dist, "barrier", lambda: None)
    monkeypatch.setattr(collective.dist, "all_reduce", lambda tensor: tensor.mul_(3))
    assert [size for size, _ in collective.time_all_reduce(torch.device("cpu"), 64)] == [4, 64]
    monkeypatch.setattr(collective.dist, "all_reduce", lambda tensor: tensor[1:].mul_(3))
    with pytest.raises(ArithmeticError, match="the sum of 2 ranks is 1.0 and not 3.0"):
        list(collective.time_all_reduce(torch.device("cpu"), 64))
