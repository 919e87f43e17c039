"""Packages that are used where they are installed and load. Neither they nor torch are imported with this module, which
needs no package: `mrl doctor` starts where none is installed.

`mrl.mcore_models.platform` asks here for the process that trains, `mrl doctor` for a process that may end by it.
"""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Literal

from mrl.errors import one_line

ABSENT = "is not installed"

MODULES: Mapping[str, Sequence[str]] = {
    "transformer_engine": ("transformer_engine.pytorch",),
    "apex": ("amp_C", "apex.optimizers", "apex.multi_tensor_apply"),
}
"""Package -> the modules of it that megatron-core takes for granted: one that lacks them is not used."""


def fault_of(package: str) -> str | None:
    """Returns why a package of `MODULES` cannot be used; None where it can. It is found by importing it: the package
    may lack its extension for torch, or be built for another torch or CUDA."""
    if importlib.util.find_spec(package) is None or mere_folder(package) is not None:
        return ABSENT
    try:
        with warnings.catch_warnings(action="ignore"):
            for module in MODULES[package]:
                importlib.import_module(module)
    except Exception as error:  # an import of C++ libraries fails as it likes: ImportError, OSError, RuntimeError
        return one_line(f"{type(error).__name__}: {error}", 160)
    return None


def mere_folder(package: str) -> pathlib.Path | None:
    """Returns the folder that Python takes for a package though it has no __init__.py, as a clone of a repository in
    the current folder; None where the package is one, or nothing of that name is found."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is not None:
        return None
    return next((pathlib.Path(folder) for folder in spec.submodule_search_locations or ()), None)


Apex = Literal["NVIDIA's", "PyPI's", "another"]


def whose_apex() -> Apex:
    """Returns whose the package is that Python finds as apex, by its files: NVIDIA's has the folder multi_tensor_apply
    however it was built, and PyPI's is for the web framework Pyramid, which it imports first of all."""
    spec = importlib.util.find_spec("apex")
    assert spec is not None, "apex is not installed"
    folders = [pathlib.Path(folder) for folder in spec.submodule_search_locations or ()]
    if any((folder / f"multi_tensor_apply{end}").exists() for folder in folders for end in ("", ".py")):
        return "NVIDIA's"
    first = pathlib.Path(spec.origin or "")
    is_pypis = first.is_file() and b"pyramid" in first.read_bytes()
    return "PyPI's" if is_pypis else "another"
