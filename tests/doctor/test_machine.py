"""Disks, limits, network, environment variables: this machine's own, and others' by files and programs that answer as theirs."""

import io
import os
import resource

import pytest

from mrl.doctor import disks, limits, network, variables
from tests.doctor.conftest import by_name

# -- disks --


def test_this_machine_s_disks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = by_name(disks.section({"HF_HOME": str(tmp_path / "not" / "there")}))
    assert {"disk.here", "disk.hub", "disk.tmp"} <= found.keys()
    assert found["disk.here"].data["path"] == str(tmp_path) and found["disk.here"].data["free"] > 0
    assert found["disk.hub"].data["path"] == str(tmp_path / "not" / "there" / "hub")
    assert not list(tmp_path.iterdir()), "nothing is left behind"


@pytest.mark.parametrize(
    "environment, folder",
    [
        ({"HF_HUB_CACHE": "/a"}, "/a"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({}, os.path.expanduser("~/.cache/huggingface/hub")),
    ],
)
def test_the_hub_s_cache_is_huggingface_hub_s(environment, folder, monkeypatch):
    assert disks.hub_cache(environment) == folder


def test_little_room(tmp_path, monkeypatch):
    def with_free(free):
        size = os.statvfs_result((4096, 4096, 10**9, free // 4096, free // 4096, 10**7, 10**6, 10**6, 0, 255))
        monkeypatch.setattr(disks.os, "statvfs", lambda _: size)
        return disks.folder("disk.here", "it", str(tmp_path), "move")

    assert [with_free(free).level for free in (2**29, 5 * 2**30, 2**40)] == ["fault", "warning", "ok"]
    assert with_free(5 * 2**30).fix == "make room, or move" and "5.0 GiB of" in with_free(5 * 2**30).what


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    full = tmp_path / "full"
    full.mkdir()
    monkeypatch.setattr(disks.tempfile, "NamedTemporaryFile", lambda **_: io.FileIO("/dev/full", "w"))
    found = disks.folder("disk.here", "it", str(full), "move")
    assert (
        found.level == "fault" and "cannot be written (No space left on device)" in found.what and found.fix == "move"
    )
    assert disks.folder("disk.hub", "it", str(full), "move").level == "warning"


def test_little_shared_memory(monkeypatch):
    size = os.statvfs_result((4096, 4096, 16384, 16384, 16384, 10, 10, 10, 0, 255))
    monkeypatch.setattr(disks.os, "statvfs", lambda _: size)
    [found] = disks._shared_memory()
    assert found.level == "warning" and "64 MiB of 64 MiB" in found.what and "--ipc=host" in found.fix


# -- limits --


def test_memory(monkeypatch):
    [found] = limits._memory()
    assert found.data["total"] > found.data["available"] > 0 and found.level in ("ok", "warning")
    monkeypatch.setattr(limits, "LITTLE_MEMORY", 2**60)
    [little] = limits._memory()
    assert little.level == "warning" and "--mem" in little.fix


def test_ulimits(monkeypatch):
    values = {resource.RLIMIT_NOFILE: (1024, 8192), resource.RLIMIT_NPROC: (100, 100)}
    monkeypatch.setattr(limits.resource, "getrlimit", values.__getitem__)
    found = by_name(limits._ulimits())
    assert found["ulimit.nofile"].fix.startswith("ulimit -n 65536") and "100 processes" in found["ulimit.nproc"].what
    for enough in ((65536, 65536), (-1, -1)):
        values |= dict.fromkeys(values, enough)
        assert not list(limits._ulimits())


# -- network --


def test_this_machine_s_network():
    found = by_name(network.section({}))
    assert "network.loopback" not in found and found["network.interfaces"].data["interfaces"]


@pytest.mark.parametrize(
    "environment, name, level",
    [
        ({"GLOO_SOCKET_IFNAME": "ib7"}, "network.gloo", "fault"),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, "network.gloo", "note"),
    ],
)
def test_variables_that_choose_an_interface(environment, name, level):
    assert by_name(network.chosen(environment, ["lo", "eth0"]))[name].level == level
    assert not list(network.chosen({}, ["lo"]))


def test_no_loopback(monkeypatch):
    def refuse(*_):
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(network.socket, "create_server", refuse)
    [found] = network._loopback()
    assert found.level == "fault" and "Cannot assign requested address" in found.what


# -- environment variables: those that change a run are shown, and secrets are not --


def shown(**environment):
    return by_name(variables.section(environment))


def test_what_is_set_is_shown_and_others_variables_are_not():
    assert shown(HOME="/root", EDITOR="vi", PYTHONUNBUFFERED="1") == {}
    found = shown(NCCL_SOCKET_NTHREADS="4", HF_HOME="/data/hf", HOME="/root")
    assert found["variables"].what == "set here: HF_HOME=/data/hf, NCCL_SOCKET_NTHREADS=4"


@pytest.mark.parametrize("name", ["HF_TOKEN", "VLLM_API_KEY"])
def test_secrets_are_not_shown(name):
    found = shown(**{name: "hf_secretsecret"})
    assert found["variables"].what == f"set here: {name}=(not shown)" and "secretsecret" not in repr(found)
    assert "TOKENIZERS_PARALLELISM=true" in shown(TOKENIZERS_PARALLELISM="true")["variables"].what
