"""Imports a package, in a process that may crash: `python -m mrl.doctor.probe NAME MODULE ...`.

It prints a line of JSON with the version or the error; of torch, another one with what torch says of this machine.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mrl.mcore_models import optional


def main(name: str, modules: Sequence[str]) -> None:
    say = own_output()
    try:
        say({"version": _version(name, modules)})
    except BaseException as error:  # a package may raise anything, SystemExit too
        say({"error": f"{type(error).__name__}: {error}"})
        return
    if name == "torch":
        from mrl.doctor.torch_facts import facts

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
