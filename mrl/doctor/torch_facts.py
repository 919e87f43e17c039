"""Facts about this machine from torch, read in a process of their own (probe.py): asking about GPUs may end it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mrl.errors import one_line


def facts() -> Mapping[str, Any]:
    """Returns plain data. A fact that raises has its message under `errors`, by name."""
    errors: dict[str, str] = {}

    def asked(name: str, ask: Callable[[], Any], otherwise: Any = None) -> Any:
        try:
            return ask()
        except Exception as error:  # a torch of another machine, or a driver, raises anything
            errors[name] = one_line(f"{type(error).__name__}: {error}", 300)
            return otherwise

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = asked("count", torch.cuda.device_count, 0)
        gpus = [asked(f"gpu {i}", functools.partial(_gpu, i)) for i in range(count)]
    found = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": getattr(torch.version, "hip", None),
        "sees_gpu": asked("cuda", torch.cuda.is_available, False),
        "count": count,
        "gpus": [gpu for gpu in gpus if gpu is not None],
        "cudnn": asked("cudnn", torch.backends.cudnn.version) if torch.version.cuda else None,
        "nccl": asked("nccl", lambda: list(torch.cuda.nccl.version())) if torch.version.cuda else None,
        "warnings": [one_line(warning.message, 300) for warning in caught],
    }
    if torch.version.cuda and not found["sees_gpu"]:
        asked("init", torch.cuda.init)  # says why
    return found | {"errors": errors}


def _gpu(index: int) -> Mapping[str, Any]:
    """Asks a GPU, and has it compute: a torch that is not built for its generation fails only then."""
    of = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    ones = torch.ones(256, 256, device=torch.device("cuda", index))
    assert float((ones @ ones).sum()) == 256.0**3, "a matrix product on it is wrong"
    capability = torch.cuda.get_device_capability(index)
    return {"name": of.name, "capability": list(capability), "free": free, "total": total}
