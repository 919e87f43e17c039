"""Packages that a run imports, and tested versions. The next release of such a package may compute something else.

These are lines of constraints-3.11.txt and constraints-3.12.txt. A wheel does not have those files; a test compares
them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

NEEDED_PACKAGES: Mapping[str, Sequence[str]] = {
    "torch": ("torch",),
    "numpy": ("numpy",),
    "transformers": ("transformers",),
    "safetensors": ("safetensors", "safetensors.torch"),
    "tokenizers": ("tokenizers",),
    "packaging": ("packaging.version",),
    "click": ("click",),
    "pyyaml": ("yaml",),
    "jinja2": ("jinja2",),
    "psutil": ("psutil",),
    "filelock": ("filelock",),
    "fsspec": ("fsspec",),
    "huggingface_hub": ("huggingface_hub",),
    "zlib-ng": ("zlib_ng.zlib_ng",),
    "rich": ("rich.progress",),
    "pyarrow": ("pyarrow", "pyarrow.parquet"),
    "datasets": ("datasets",),
    "wandb": ("wandb",),
    "plotly": ("plotly",),
    "matplotlib": ("matplotlib",),
    "peft": ("peft",),
    "megatron-core": ("megatron.core",),
}
"""What setup.py asks for, and the modules that are imported to see whether it loads, the compiled ones among them."""

NEED_TORCH = ("safetensors", "peft", "megatron-core")
"""Those that are not tried where torch does not load."""

OF_A_FEATURE: Mapping[str, str] = {
    "wandb": "log.wandb",
    "plotly": "mrl report",
    "matplotlib": "mrl report",
    "peft": "model.lora",
    "megatron-core": "engine.backend: megatron, the default,",
}
"""What does not work without a package. Without another one no run starts."""

_ON_ALL: Mapping[str, str] = {"torch": "2.13.0", "transformers": "5.23.0", "transformer-engine": "2.20.2"}
_BY_PYTHON: Mapping[str, Mapping[str, str]] = {"3.11": {"megatron-core": "0.16.1"}, "3.12": {"megatron-core": "0.19.2"}}
PYTHONS = tuple(_BY_PYTHON)


def this_python() -> str:
    """Returns "3.11" for Python 3.11.7."""
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def versions(python: str) -> Mapping[str, str]:
    """Returns package -> version of the tested set for a Python; empty if there is none."""
    return {**_ON_ALL, **_BY_PYTHON[python]} if python in _BY_PYTHON else {}
