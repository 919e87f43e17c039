"""Says whether transformer-engine and apex are used in this process, and hides them from megatron-core if not."""

from __future__ import annotations

import functools
import importlib.util
import sys

from mrl.mcore_models.optional import ABSENT, fault_of
from mrl.ops import devices
from mrl.ops.devices import has_gpu as has_gpu  # code outside mrl imports it from here

NO_GPU = "torch sees no GPU"


@functools.cache
def without_transformer_engine() -> str | None:
    """Returns why transformer-engine is not used in this process; None if it can be."""
    return NO_GPU if not devices.has_gpu() else fault_of("transformer_engine")


@functools.cache
def without_apex() -> str | None:
    """Returns why NVIDIA's apex is not used in this process; None if it can be. PyPI's apex is another program."""
    return NO_GPU if not devices.has_gpu() else fault_of("apex")


def is_broken_package(why: str | None) -> bool:
    """Returns whether the result of a `without_...` is the fault of a package that is installed."""
    return why not in (None, NO_GPU, ABSENT)


def missing(absent: str) -> str:
    """Returns what is needed and not there, behind "needs". absent: of `without_transformer_engine`."""
    return "a GPU, and torch sees none" if absent == NO_GPU else f"transformer-engine, which {absent}"


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
