"""Imports packages one after another, in a process that may crash: `python -m mrl.doctor.probe REQUEST`.

REQUEST is JSON:

    steps: [the fields of `imports.Step`, ...]
    failed: [names of steps that went wrong before]
    hidden: [packages to treat as absent]
    limit_s: the longest time of a step

A line of JSON is printed before each step and another one after it. So the reader (imports.py) knows the step that the
process ended in.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mrl.mcore_models import optional

FACTS = "torch facts"
"""The step that asks torch about this machine."""


def main(request: Mapping[str, Any]) -> None:
    say = own_output()
    for package in request["hidden"]:
        sys.modules[package] = None  # type: ignore[assignment]  # to Python's import: there is no such package
    failed = set(request["failed"])
    for step in request["steps"]:
        name = step["name"]
        if step["needs"] in failed:
            failed.add(name)
            say({"name": name, "blocked_by": step["needs"]})
            continue
        say({"begun": name})
        # SIGALRM's default action ends the process, also inside C++ that never comes back to Python
        signal.setitimer(signal.ITIMER_REAL, request["limit_s"])
        begun = time.perf_counter()
        result = _facts() if name == FACTS else _imported(name, step["modules"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        if "error" in result:
            failed.add(name)
        say({"name": name, "seconds": time.perf_counter() - begun, **result})


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


def _imported(name: str, modules: Sequence[str]) -> Mapping[str, Any]:
    """Imports `modules`. Returns what went wrong, or the version and the file of the first."""
    if name in optional.MODULES:  # as the process that trains finds out
        fault = optional.fault_of(name)
        return {"error": fault} if fault is not None else _about(importlib.import_module(name))
    try:  # peft imports transformer-engine where it is
        with warnings.catch_warnings(action="ignore"), optional.use_cudnn_of_torch():
            found = [importlib.import_module(module) for module in modules]
    except BaseException as error:  # a package may raise anything, SystemExit too
        return {"error": f"{type(error).__name__}: {error}"}
    return _about(found[0])


def _about(module: Any) -> Mapping[str, Any]:
    try:
        with warnings.catch_warnings(action="ignore"):  # else it would be taken for the last words of what comes next
            version = getattr(module, "__version__", None)
    except Exception:  # click and others look it up among installed packages, where they may not be
        version = None
    return {
        "version": version if isinstance(version, str) else None,
        "file": getattr(module, "__file__", None),
        "is_package": module.__spec__ is not None and module.__spec__.origin is not None,
    }


def _facts() -> Mapping[str, Any]:
    from mrl.doctor.torch_facts import facts

    return {"facts": facts()}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
