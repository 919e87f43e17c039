"""Compilers: tried in earnest, absent, broken, and without the headers of Python."""

import shutil

import pytest

from mrl.doctor import compilers
from tests.doctor.conftest import by_name
from tests.doctor.machines import program


def look(gpu, environment=None):
    tried = compilers.c_compiler(environment or {}), compilers.cpp_compiler(environment or {})
    return by_name(compilers.section(*tried, gpu=gpu))


@pytest.mark.skipif(not (shutil.which("gcc") and shutil.which("g++")), reason="needs gcc and g++")
def test_those_of_this_machine():
    found = look(gpu=True)
    assert found["compiler.c++"].level == "ok" and found["compiler.c++"].data["path"] == shutil.which("g++")
    assert found["compiler.c"].level == "ok" or "Python.h" in found["compiler.c"].what


def test_none_stops_a_run_on_a_gpu_alone(programs):
    on_gpu, on_cpu = look(gpu=True), look(gpu=False)
    assert on_gpu["compiler.c"].level == "fault" and "apt-get install gcc" in on_gpu["compiler.c"].fix
    assert on_gpu["compiler.c"].what.startswith("no C compiler (gcc or clang, or CC): kernels that are compiled while")
    assert on_cpu["compiler.c"].level == on_cpu["compiler.c++"].level == "note"
    assert on_cpu["compiler.c++"].what == "no C++ compiler (g++, or CXX): engine.fsdp.compile does not work"
    named = look(gpu=True, environment={"CC": "icc -m64"})["compiler.c"]
    assert named.what.startswith("no C compiler (icc -m64 is not on the PATH): ")


def test_one_without_pythons_headers(programs):
    program(programs, "clang", "echo 'x.c:1:10: fatal error: Python.h: No such file or directory' >&2; exit 1")
    found = look(gpu=True)["compiler.c"]
    assert found.level == "fault" and found.what.startswith(
        f"{programs}/clang finds no headers of Python (Python.h, in /"
    )
    assert "-dev" in found.fix


def test_one_that_breaks(programs, monkeypatch):
    program(
        programs, "gcc", "echo 'gcc: fatal error: cannot execute cc1' >&2; echo 'compilation terminated.' >&2; exit 1"
    )
    program(programs, "g++", "sleep 60")
    monkeypatch.setattr(compilers, "LIMIT_S", 0.3)
    found = look(gpu=True)
    assert "gcc does not work (gcc: fatal error: cannot execute cc1): kernels" in found["compiler.c"].what
    assert found["compiler.c++"].what.endswith(
        "g++ does not work (did not end within 0.3 s): engine.fsdp.compile does not work"
    )
