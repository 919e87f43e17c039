"""Packages that are used where they are installed and load. Neither they nor torch are imported with this module.

`mrl.mcore_models.platform` asks here for the process that trains, `mrl doctor` for a process that may end by it.
"""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import warnings
from collections.abc import Mapping, Sequence

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
    if importlib.util.find_spec(package) is None:
        return ABSENT
    try:
        with warnings.catch_warnings(action="ignore"):
            for module in MODULES[package]:
                importlib.import_module(module)
    except Exception as error:  # an import of C++ libraries fails as it likes: ImportError, OSError, RuntimeError
        return one_line(f"{type(error).__name__}: {error}", 160)
    return None


def is_another_apex() -> bool:
    """Returns whether what is installed as apex is not NVIDIA's: PyPI has another program of that name, for the web
    framework Pyramid. NVIDIA's has the folder `multi_tensor_apply` however it was built."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return False
    folders = [pathlib.Path(folder) for folder in spec.submodule_search_locations or ()]
    return not any((folder / f"multi_tensor_apply{end}").exists() for folder in folders for end in ("", ".py"))
