"""Imports a package, in a process that may crash: `python -m mrl.doctor.probe NAME MODULE ...`.

It prints a line of JSON with the version or the error; of torch, another one with what torch says of this machine.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.metadata
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mrl.errors import one_line
from mrl.mcore_models import optional


def main(name: str, modules: Sequence[str]) -> None:
    say = own_output()
    try:
        say({"version": _version(name, modules)})
    except BaseException as error:  # a package may raise anything, SystemExit too
        say({"error": f"{type(error).__name__}: {error}"})
        return
    if name == "torch":
        say({"facts": facts()})


def _version(name: str, modules: Sequence[str]) -> str | None:
    """Imports the modules. Returns the version of the first, if it has one."""
    if name == "megatron-core":
        from mrl.mcore_models import cpu_stand_in

        cpu_stand_in.prepare()
    fault = optional.fault_of(name) if name in optional.MODULES else None  # as the process that trains finds out
    if fault is not None:
        raise ImportError(fault)
    with warnings.catch_warnings(action="ignore"), optional.use_cudnn_of_torch():  # peft imports transformer-engine
        found = [importlib.import_module(module) for module in modules]
        try:
            version = getattr(found[0], "__version__", None)
        except importlib.metadata.PackageNotFoundError:  # click looks it up among installed packages
            version = None
    if found[0].__spec__ is None or found[0].__spec__.origin is None:
        raise ImportError("it is a folder of that name without code")
    return version if isinstance(version, str) else None


def facts() -> Mapping[str, Any]:
    """Returns what torch says of this machine, as plain data: asking about GPUs may end the process.

    A fact that raises has its message under `errors`, by name.
    """
    import torch

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
    import torch

    of = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    ones = torch.ones(256, 256, device=torch.device("cuda", index))
    assert float((ones @ ones).sum()) == 256.0**3, "a matrix product on it is wrong"
    capability = torch.cuda.get_device_capability(index)
    return {"name": of.name, "capability": list(capability), "free": free, "total": total}


def own_output() -> Callable[[Mapping[str, Any]], None]:
    """Returns what writes a line to this process's output; what packages print goes to stderr from now on.

    Garbage is no longer looked for: that is a fifth of the time of imports as many as these.
    """
    gc.disable()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(line: Mapping[str, Any]) -> None:
        out.write(json.dumps(line) + "\n")
        out.flush()

    return say


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
