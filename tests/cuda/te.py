"""transformer-engine's own Python modules without its C++: imported and built, never computed with.

`make` puts the Python part of the wheel beside the venv's packages, where nothing finds it unless `boot` says so: mrl
and megatron-core must not take it for a working installation.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types
from pathlib import Path
from typing import Any

WHEEL = Path(sys.prefix) / "te"
STUB = Path(__file__).with_name("te_stub")


def boot() -> None:
    """`import transformer_engine.pytorch` works in this process from now on. Call it after `fake.install()`."""
    assert (WHEEL / "transformer_engine").is_dir(), f"{WHEEL} is missing: `make te-modules` fetches it"
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # its C++ library is not looked for
    sys.path[:0] = [str(STUB)]
    sys.path.append(str(WHEEL))
    sys.meta_path.insert(0, _Finder)


ABSENT = (
    "transformer_engine.pytorch.onnx_extensions",  # needs onnxscript
    "transformer_engine.pytorch.triton",
    "transformer_engine.common.triton",
)
"""Its modules that need packages which a machine without a GPU has not: kernels in Triton, and the export to ONNX."""


class _Finder:
    """Finds transformer_engine.common, and keeps it from loading the extension, for which the stub stands in; and gives
    `ABSENT` and what is in them as modules in which any name is a function that refuses to be called."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name.startswith(ABSENT):
            return importlib.machinery.ModuleSpec(name, _Names(), is_package=True)
        if name != "transformer_engine.common":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Names:
    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)

        def refuse(name: str) -> Any:
            def value(*_: Any, **__: Any) -> None:
                raise NotImplementedError(f"{spec.name}.{name} is a name alone here")

            if name.startswith("__"):
                raise AttributeError(name)
            return value

        module.__getattr__ = refuse
        return module

    def exec_module(self, module: types.ModuleType) -> None: ...


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: Any) -> None:
        super().exec_module(module)
        module.load_framework_extension = lambda framework: None
