"""Which device models compute on in this process, and what follows from it. Nothing else asks for a GPU."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import warnings

import torch

from mrl.errors import ConfigError, one_line

CPU = torch.device("cpu")
NO_GPU = "torch sees no GPU"
ABSENT = "is not installed"


def has_gpu() -> bool:
    """Returns whether models compute on CUDA in this process."""
    return torch.cuda.is_available()


def device_type(wanted: str = "auto") -> str:
    """ "cuda" or "cpu" for a value of engine.device. Raises ConfigError where there is no such device."""
    if wanted == "cuda" and not has_gpu():
        raise ConfigError("engine.device", wanted, "needs a GPU, and torch sees none", "use auto or cpu")
    return wanted if wanted != "auto" else "cuda" if has_gpu() else "cpu"


@functools.cache
def without_transformer_engine() -> str | None:
    """Returns why transformer-engine is not used in this process; None where it can be. It is found by importing it:
    the package may lack its extension for torch, or be built for another torch or CUDA."""
    return NO_GPU if not has_gpu() else _fault("transformer_engine", "transformer_engine.pytorch")


@functools.cache
def without_apex() -> str | None:
    """As `without_transformer_engine`, of NVIDIA's apex. What PyPI has under that name is another program."""
    return NO_GPU if not has_gpu() else _fault("apex", "amp_C", "apex.optimizers", "apex.multi_tensor_apply")


def _fault(package: str, *modules: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return ABSENT
    try:
        with warnings.catch_warnings(action="ignore"):
            for module in modules:
                importlib.import_module(module)
    except Exception as error:  # an import of C++ libraries fails as it likes: ImportError, OSError, RuntimeError
        return one_line(f"{type(error).__name__}: {error}", 160)
    return None


def hide_what_does_not_load() -> None:
    """Before megatron-core is imported: lets it see no transformer-engine and no apex but those that are used.

    It asks for them by `try: import ... except ImportError` in some forty files. Any other error of such an import
    would end the program, and of a package that loads in part it would take for granted what is not there.
    """
    for package, fault in (("transformer_engine", without_transformer_engine()), ("apex", without_apex())):
        if fault is None or importlib.util.find_spec(package) is None:
            continue
        for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
            del sys.modules[name]
        sys.modules[package] = None  # type: ignore[assignment]  # to Python's import: there is no such package


def device() -> torch.device:
    """Where models live in this process: the current CUDA device, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu() else CPU
