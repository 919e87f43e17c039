"""Disks, limits, network, environment variables: this machine's own, and others' by files and programs that answer as theirs."""

import importlib.util
import io
import os
import resource
import subprocess
import sys
import sysconfig

import pytest

from mrl.doctor import machine
from mrl.doctor.machine import c_compiler
from tests.doctor.conftest import by_name, program

# -- disks --


def test_this_machine_s_disks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = by_name(machine.disks({"HF_HOME": str(tmp_path / "not" / "there")}))
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
    assert machine.hub_cache(environment) == folder


def test_little_room(tmp_path, monkeypatch):
    def with_free(free):
        size = os.statvfs_result((4096, 4096, 10**9, free // 4096, free // 4096, 10**7, 10**6, 10**6, 0, 255))
        monkeypatch.setattr(machine.os, "statvfs", lambda _: size)
        return machine.folder("disk.here", "it", str(tmp_path), "move")

    assert [with_free(free).level for free in (2**29, 5 * 2**30, 2**40)] == ["fault", "warning", "ok"]
    assert with_free(5 * 2**30).fix == "make room, or move" and "5.0 GiB of" in with_free(5 * 2**30).what


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    full = tmp_path / "full"
    full.mkdir()
    monkeypatch.setattr(machine.tempfile, "NamedTemporaryFile", lambda **_: io.FileIO("/dev/full", "w"))
    found = machine.folder("disk.here", "it", str(full), "move")
    assert (
        found.level == "fault" and "cannot be written (No space left on device)" in found.what and found.fix == "move"
    )
    assert machine.folder("disk.hub", "it", str(full), "move").level == "warning"


def test_little_shared_memory(monkeypatch):
    size = os.statvfs_result((4096, 4096, 16384, 16384, 16384, 10, 10, 10, 0, 255))
    monkeypatch.setattr(machine.os, "statvfs", lambda _: size)
    [found] = machine._shared_memory()
    assert found.level == "warning" and "64 MiB of 64 MiB" in found.what and "--ipc=host" in found.fix


# -- limits --


def test_memory(monkeypatch):
    [found] = machine._memory()
    assert found.data["total"] > found.data["available"] > 0 and found.level in ("ok", "warning")
    monkeypatch.setattr(machine, "LITTLE_MEMORY", 2**60)
    [little] = machine._memory()
    assert little.level == "warning" and "--mem" in little.fix


def test_ulimits(monkeypatch):
    values = {resource.RLIMIT_NOFILE: (1024, 8192), resource.RLIMIT_NPROC: (100, 100)}
    monkeypatch.setattr(machine.resource, "getrlimit", values.__getitem__)
    found = by_name(machine._ulimits())
    assert found["ulimit.nofile"].fix.startswith("ulimit -n 65536") and "100 processes" in found["ulimit.nproc"].what
    for enough in ((65536, 65536), (-1, -1)):
        values |= dict.fromkeys(values, enough)
        assert not list(machine._ulimits())


# -- network --


def test_this_machine_s_network():
    found = by_name(machine.network({}))
    assert "network.loopback" not in found and found["network.interfaces"].data["interfaces"]


@pytest.mark.parametrize(
    "environment, name, level",
    [
        ({"GLOO_SOCKET_IFNAME": "ib7"}, "network.gloo", "fault"),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, "network.gloo", "note"),
    ],
)
def test_variables_that_choose_an_interface(environment, name, level):
    assert by_name(machine.chosen_interface(environment, ["lo", "eth0"]))[name].level == level
    assert not list(machine.chosen_interface({}, ["lo"]))


def test_no_loopback(monkeypatch):
    def refuse(*_):
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(machine.socket, "create_server", refuse)
    [found] = machine._loopback()
    assert found.level == "fault" and "Cannot assign requested address" in found.what


# -- environment variables: those that change a run are shown, and secrets are not --


def shown(**environment):
    return by_name(machine.variables(environment))


def test_what_is_set_is_shown_and_others_variables_are_not():
    assert shown(HOME="/root", EDITOR="vi", PYTHONUNBUFFERED="1") == {}
    found = shown(NCCL_SOCKET_NTHREADS="4", HF_HOME="/data/hf", HOME="/root")
    assert found["variables"].what == "set here: HF_HOME=/data/hf, NCCL_SOCKET_NTHREADS=4"


@pytest.mark.parametrize("name", ["HF_TOKEN", "VLLM_API_KEY"])
def test_secrets_are_not_shown(name):
    found = shown(**{name: "hf_secretsecret"})
    assert found["variables"].what == f"set here: {name}=(not shown)" and "secretsecret" not in repr(found)
    assert "TOKENIZERS_PARALLELISM=true" in shown(TOKENIZERS_PARALLELISM="true")["variables"].what


# -- the C compiler that triton takes: there, absent, and without the headers of Python --


def test_none_stops_a_run_on_a_gpu_alone(programs):
    on_gpu = c_compiler({}, gpu=True)
    assert on_gpu.level == "fault" and "apt-get install gcc" in on_gpu.fix
    assert on_gpu.what.startswith("no C compiler (gcc or clang, or CC): kernels that are compiled while")
    assert c_compiler({}, gpu=False).level == "note"
    for wanted in ("icc -m64", ""):
        what = c_compiler({"CC": wanted}, gpu=True).what
        assert what.startswith(f"no C compiler (CC={wanted!r} names no program on the PATH): ")


def test_pythons_headers(programs, tmp_path, monkeypatch):
    program(programs, "clang", "exit 0")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    found = c_compiler({}, gpu=True)
    assert found.level == "fault" and found.what.startswith(
        f"no headers of Python for the C compiler (Python.h, in {tmp_path})"
    )
    assert "-dev" in found.fix
    (tmp_path / "Python.h").touch()
    assert c_compiler({}, gpu=True).what == f"C compiler: {programs}/clang, with Python's headers"


def test_a_run_on_a_gpu_says_what_its_kernels_lack(programs):
    """In a process of its own: the kernels' package looks once."""
    code = "from mrl.kernels import operators; print(operators.CAN_COMPILE, *operators.notes())"
    environment = os.environ | {"CC": "icc -m64"}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.startswith("False kernels: torch's own run, which are slower, because there is no ")
    if importlib.util.find_spec("triton") is not None:
        assert "CC='icc -m64' names no program" in said.stdout
