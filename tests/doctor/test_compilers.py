"""The C compiler that triton takes: there, absent, and without the headers of Python."""

import importlib.util
import os
import subprocess
import sys
import sysconfig

from mrl.doctor.compilers import c_compiler
from tests.doctor.machines import program


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
