"""The C compiler and Python's headers: triton and megatron's fused functions compile with them while a run goes on."""

from __future__ import annotations

import os
from collections.abc import Mapping

from mrl.doctor.findings import Finding, fault, note, ok
from mrl.kernels import compiler


def c_compiler(environment: Mapping[str, str] = os.environ, *, gpu: bool) -> Finding:
    """Looks for triton's compiler (triton/runtime/build.py). gpu: a GPU is here; nothing else needs the compiler."""
    path, what = compiler.c_compiler(environment)
    fix = "apt-get install gcc python3-dev, name a compiler in CC, or take a Python of uv, conda or pyenv"
    if not what:
        return ok("compiler.c", f"C compiler: {path}, with Python's headers", path=path)
    if not gpu:
        return note("compiler.c", f"{what}: nothing is lost without a GPU", path=path)
    costs = "kernels that are compiled while a run goes on are not, and it stops (megatron's fused functions, triton)"
    return fault("compiler.c", f"{what}: {costs}", fix, path=path)
