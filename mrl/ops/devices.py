"""Chooses the device that models compute on in this process, and copies between it and the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mrl.errors import ConfigError

CPU, META = torch.device("cpu"), torch.device("meta")

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


def device() -> torch.device:
    """Returns the device of models in this process: the current CUDA device, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu() else _without_gpu


def tensor_on(where: torch.device, values: Sequence[Any] | Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Returns a tensor of the host's numbers. On a GPU they go through pinned memory: the host does not wait."""
    if where.type != "cuda":
        return torch.as_tensor(values, dtype=dtype, device=where)
    return torch.as_tensor(values, dtype=dtype).pin_memory().to(where, non_blocking=True)


class HostCopy:
    """Copies a tensor to the host. Only reading it waits, and not for what a GPU was given to do after the copy."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._copied: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def tolist(self) -> list[Any]:
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensor.tolist()
