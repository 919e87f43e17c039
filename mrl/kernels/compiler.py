"""Finds what Triton compiles its launchers with: a C compiler and Python's headers. It imports no torch."""

from __future__ import annotations

import os
import pathlib
import shutil
import sysconfig
from collections.abc import Mapping


def c_compiler(environment: Mapping[str, str] = os.environ) -> tuple[str | None, str]:
    """Returns the compiler's path and what is missing in words, "" if nothing is.

    It is the environment's CC, else gcc, else clang, as in triton 3.7 (runtime/build.py), which starts CC as one
    program without arguments.
    """
    wanted = environment.get("CC")
    path = shutil.which(wanted) if wanted is not None else shutil.which("gcc") or shutil.which("clang")
    if path is None and wanted is not None:
        return None, f"no C compiler (CC={wanted!r} names no program on the PATH)"
    if path is None:
        return None, "no C compiler (gcc or clang, or CC)"
    include = sysconfig.get_paths()["include"]
    if not pathlib.Path(include, "Python.h").exists():
        return path, f"no headers of Python for the C compiler (Python.h, in {include})"
    return path, ""
