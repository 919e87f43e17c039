"""The C and C++ compilers and Python's headers, each tried: torch.compile and triton compile while a run goes on."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from mrl.doctor.ask import program
from mrl.doctor.findings import Finding, fault, note, ok

LIMIT_S = 30.0


@dataclasses.dataclass(frozen=True)
class Compiler:
    """What trying a compiler came to."""

    path: str | None  # None where there is none
    error: str | None = None  # in words; None where it compiles


def c_compiler(environment: Mapping[str, str] = os.environ) -> Compiler:
    """Tries the one that triton takes (triton/runtime/build.py), with what its launchers include."""
    include = sysconfig.get_paths()["include"]
    return _tried(environment.get("CC"), ("gcc", "clang"), "#include <Python.h>\n", ".c", f"-I{include}")


def cpp_compiler(environment: Mapping[str, str] = os.environ) -> Compiler:
    """Tries the one that torch.compile asks for (`get_cpp_compiler`)."""
    return _tried(environment.get("CXX"), ("g++",), "#include <vector>\n", ".cpp")


def _tried(wanted: str | None, names: Sequence[str], source: str, ending: str, *flags: str) -> Compiler:
    path = next(filter(None, map(shutil.which, (wanted,) if wanted else names)), None)
    if path is None:
        return Compiler(None, f"{wanted} is not on the PATH" if wanted else None)
    with tempfile.TemporaryDirectory(prefix="mrl_doctor_") as folder:
        file = pathlib.Path(folder, f"x{ending}")
        file.write_text(source)
        answer = program(path, "-shared", "-fPIC", *flags, str(file), "-o", f"{folder}/x.so", limit_s=LIMIT_S)
    assert answer is not None, path
    lines = answer.err.splitlines()
    why = next((line for line in lines if "error" in line), answer.said)  # the first is what the others follow from
    return Compiler(path, None if answer.ok else why.strip()[:300])


def section(c: Compiler, cpp: Compiler, *, gpu: bool) -> Iterator[Finding]:
    """gpu: whether there is one, which alone needs the C compiler."""
    yield _c(c, gpu=gpu)
    if cpp.path is not None and cpp.error is None:
        yield ok("compiler.c++", f"C++ compiler: {cpp.path}", path=cpp.path)
        return
    what = f"the C++ compiler {cpp.path} does not work ({cpp.error})" if cpp.path else "no C++ compiler (g++, or CXX)"
    yield note("compiler.c++", f"{what}: engine.fsdp.compile does not work")


def _c(found: Compiler, *, gpu: bool) -> Finding:
    data = {"path": found.path}
    if found.path is not None and found.error is None:
        return ok("compiler.c", f"C compiler: {found.path}, with Python's headers", **data)
    fix = "apt-get install gcc (dnf install gcc), or name one in CC"
    if found.path is None:
        what = f"no C compiler ({found.error or 'gcc or clang, or CC'})"
    elif "Python.h" in (found.error or ""):
        what = f"{found.path} finds no headers of Python (Python.h, in {sysconfig.get_paths()['include']})"
        named = f"python{sys.version_info[0]}.{sys.version_info[1]}-dev"
        fix = f"apt-get install {named} (dnf install {named}el), or take a Python of uv, conda or pyenv, which has them"
    else:
        what = f"the C compiler {found.path} does not work ({found.error})"
    if not gpu:
        return note("compiler.c", f"{what}: nothing is lost without a GPU", **data)
    costs = "kernels that are compiled while a run goes on are not, and it stops (megatron's fused functions, triton)"
    return fault("compiler.c", f"{what}: {costs}", fix, **data)
