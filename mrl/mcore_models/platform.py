"""Chooses the device that models compute on in this process. Nothing else asks for a GPU."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mrl.errors import ConfigError
from mrl.mcore_models.optional import ABSENT, fault_of

CPU, META = torch.device("cpu"), torch.device("meta")
NO_GPU = "torch sees no GPU"


_without_gpu = CPU


def use_meta_device() -> None:
    """Makes models of this process of tensors without memory from now on (mrl.plan), even if there is a GPU."""
    global _without_gpu
    _without_gpu = META


def has_gpu() -> bool:
    """Returns whether models compute on CUDA in this process."""
    return _without_gpu == CPU and torch.cuda.is_available()


def capability() -> tuple[int, int] | None:
    """Returns the compute capability of the GPU in use; None without one."""
    return torch.cuda.get_device_capability() if has_gpu() else None


def device_type(wanted: str = "auto") -> str:
    """Returns "cuda" or "cpu" for a value of engine.device. Raises ConfigError if there is no such device."""
    if wanted == "cuda" and not has_gpu():
        raise ConfigError("engine.device", wanted, "needs a GPU, and torch sees none", "use auto or cpu")
    return wanted if wanted != "auto" else "cuda" if has_gpu() else "cpu"


@functools.cache
def without_transformer_engine() -> str | None:
    """Returns why transformer-engine is not used in this process; None if it can be."""
    return NO_GPU if not has_gpu() else fault_of("transformer_engine")


@functools.cache
def without_apex() -> str | None:
    """Returns why NVIDIA's apex is not used in this process; None if it can be. PyPI's apex is another program."""
    return NO_GPU if not has_gpu() else fault_of("apex")


def is_broken_package(why: str | None) -> bool:
    """Returns whether the result of a `without_...` is the fault of a package that is installed."""
    return why not in (None, NO_GPU, ABSENT)


def hide_what_does_not_load() -> None:
    """Hides transformer-engine and apex from megatron-core unless they are used. Call it before megatron-core is
    imported.

    megatron-core asks for them by `try: import ... except ImportError` in some forty files. Any other error of such an
    import would end the program. If a package loads in part, megatron-core takes the rest for granted.
    """
    for package, fault in (("transformer_engine", without_transformer_engine()), ("apex", without_apex())):
        if fault is None or importlib.util.find_spec(package) is None:
            continue
        for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
            del sys.modules[name]
        sys.modules[package] = None  # type: ignore[assignment]  # to Python's import: there is no such package


def device() -> torch.device:
    """Returns the device of models in this process: the current CUDA device, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu() else _without_gpu


def tensor_on(where: torch.device, values: Sequence[Any] | Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Returns a tensor of the host's numbers. On a GPU they go through pinned memory: the host does not wait."""
    if where.type != "cuda":
        return torch.as_tensor(values, dtype=dtype, device=where)
    return torch.as_tensor(values, dtype=dtype).pin_memory().to(where, non_blocking=True)
