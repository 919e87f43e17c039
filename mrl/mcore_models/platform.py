"""Which device models compute on in this process, and what follows from it. Nothing else asks for a GPU."""

from __future__ import annotations

import importlib.util

import torch

from mrl.errors import ConfigError

CPU = torch.device("cpu")


def has_gpu() -> bool:
    """Returns whether models compute on CUDA in this process."""
    return torch.cuda.is_available()


def device_type(wanted: str = "auto") -> str:
    """ "cuda" or "cpu" for a value of engine.device. Raises ConfigError where there is no such device."""
    if wanted == "cuda" and not has_gpu():
        raise ConfigError("engine.device", wanted, "needs a GPU, and torch sees none", "use auto or cpu")
    return wanted if wanted != "auto" else "cuda" if has_gpu() else "cpu"


def has_transformer_engine() -> bool:
    """Returns whether transformer-engine is installed and has the GPU that it needs."""
    return has_gpu() and importlib.util.find_spec("transformer_engine") is not None


def fused_adamw() -> bool | None:
    """torch's `fused` for AdamW: one pass over memory on a CPU; on a GPU torch chooses."""
    return None if has_gpu() else True


def device() -> torch.device:
    """Where models live in this process: the current CUDA device, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu() else CPU
