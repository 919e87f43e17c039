"""Finds packages that are used if they are installed and load.

This module imports neither them nor torch, and needs no package: `mrl doctor` starts even if none is installed.
`mrl.mcore_models.platform` asks here for the process that trains. `mrl doctor` asks for a process that may die of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import pathlib
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence

from mrl.errors import one_line

ABSENT = "is not installed"

MODULES: Mapping[str, Sequence[str]] = {
    "transformer_engine": ("transformer_engine.pytorch",),
    "apex": ("amp_C", "apex.optimizers", "apex.multi_tensor_apply"),
}
"""Package -> the modules of it that megatron-core takes for granted. A package without them is not used."""


def fault_of(package: str) -> str | None:
    """Returns why a package of `MODULES` cannot be used; None if it can.

    It imports the package to find out: it may lack its extension for torch, or be built for another torch or CUDA.
    """
    if not is_package(package):
        return ABSENT
    try:
        with warnings.catch_warnings(action="ignore"), use_cudnn_of_torch():
            for module in MODULES[package]:
                importlib.import_module(module)
        backends = getattr(sys.modules.get("torch"), "backends", None)
        if backends is not None and package == "transformer_engine":
            backends.cudnn.version()  # raises where the process now has another than torch's
    except Exception as error:  # an import of C++ libraries fails as it likes: ImportError, OSError, RuntimeError
        return one_line(f"{type(error).__name__}: {error}", 160)
    return None


CUDNN_VARIABLES = ("CUDNN_HOME", "CUDNN_PATH")
"""Variables of transformer-engine: a folder to look for cuDNN first."""


@contextlib.contextmanager
def use_cudnn_of_torch() -> Iterator[None]:
    """Makes transformer-engine use the cuDNN that came with torch from pip, while it is imported inside.

    By itself it takes a system's first, such as that of CUDA's images. Then torch's parts of cuDNN find the system's
    parts by their names. No kernel of cuDNN works in a process with parts of two versions.

    Nothing is done if a variable of `CUDNN_VARIABLES` names another, or if torch brought none, as in NVIDIA's image.
    Programs that are started later inherit no variable of it.
    """
    parts = _parts_of_cudnn()
    if not parts or any(os.environ.get(name) for name in CUDNN_VARIABLES):
        yield
        return
    os.environ["CUDNN_HOME"] = str(parts[0].parent.parent)
    try:
        for part in parts:
            with contextlib.suppress(OSError):  # of a machine that lacks what it needs: the import then says so
                ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)
        yield
    finally:
        del os.environ["CUDNN_HOME"]


def _parts_of_cudnn() -> list[pathlib.Path]:
    """Returns the libraries of pip's cuDNN; [] if there is none."""
    try:
        spec = importlib.util.find_spec("nvidia.cudnn")
    except ModuleNotFoundError:
        return []
    folders = [] if spec is None else [pathlib.Path(folder) for folder in spec.submodule_search_locations or ()]
    return [part for folder in folders for part in sorted(folder.glob("lib/libcudnn*.so.*"))]


def is_package(name: str) -> bool:
    """Returns whether there is such a package. A folder without __init__.py is none, such as a clone in the current
    folder."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def is_nvidias_apex() -> bool:
    """Returns whether the package that Python finds as apex is NVIDIA's, by its files. PyPI's is for the web framework
    Pyramid."""
    spec = importlib.util.find_spec("apex")
    assert spec is not None, "apex is not installed"
    folders = [pathlib.Path(folder) for folder in spec.submodule_search_locations or ()]
    return any((folder / "multi_tensor_apply").exists() for folder in folders)
