"""transformer-engine's own Python modules without its C++: imported and built, never computed with.

`make` puts the Python part of the wheel beside the venv's packages, where nothing finds it unless `boot` says so: mrl
and megatron-core must not take it for a working installation.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
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


class _Finder:
    """Finds transformer_engine.common, and keeps it from loading the extension, for which the stub stands in."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name != "transformer_engine.common":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: Any) -> None:
        super().exec_module(module)
        module.load_framework_extension = lambda framework: None
