"""Packages that a run imports, and tested versions. The next release of such a package may compute something else.

These are lines of constraints-3.11.txt and constraints-3.12.txt. A wheel does not have those files; a test compares
them.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Package:
    """A package of Python, as pip calls it."""

    name: str
    modules: Sequence[str]  # imported to see whether it loads; the compiled ones among them
    without: str  # what does not work without it
    always: bool = True  # every run imports it
    needs_torch: bool = False


TRAINING = "no run starts"

NEEDED_PACKAGES: Sequence[Package] = (
    Package("numpy", ("numpy",), TRAINING),
    Package("torch", ("torch",), "nothing trains, generates or converts"),
    Package("transformers", ("transformers",), "no model or tokenizer is read"),
    Package("safetensors", ("safetensors", "safetensors.torch"), "no weights are read or written", needs_torch=True),
    Package("tokenizers", ("tokenizers",), "no tokenizer is read"),
    Package("packaging", ("packaging.version",), TRAINING),
    Package("click", ("click",), "the command line does not start"),
    Package("pyyaml", ("yaml",), "no config is read"),
    Package("jinja2", ("jinja2",), "no chat template is rendered"),
    Package("psutil", ("psutil",), "no processes are started"),
    Package("filelock", ("filelock",), TRAINING),
    Package("fsspec", ("fsspec",), TRAINING),
    Package("huggingface_hub", ("huggingface_hub",), "no hub id is read"),
    Package("zlib-ng", ("zlib_ng.zlib_ng",), "no checkpoint is written or converted"),
    Package("rich", ("rich.progress",), "no run starts but with log.console=none, and nothing is converted"),
    Package("pyarrow", ("pyarrow", "pyarrow.parquet"), "no data is read"),
    Package("datasets", ("datasets",), "no data is read"),
    Package("wandb", ("wandb",), "log.wandb does not work", always=False),
    Package("plotly", ("plotly",), "mrl report does not work", always=False),
    Package("matplotlib", ("matplotlib",), "mrl report does not work", always=False),
    Package("peft", ("peft",), "model.lora does not work", always=False, needs_torch=True),
)
"""What setup.py asks for, in the order that it is imported in; megatron-core is imported with what stands in for GPUs
(choices.py)."""

MEGATRON = "megatron-core"

_ON_ALL: Mapping[str, str] = {"torch": "2.13.0", "transformers": "5.23.0", "transformer-engine": "2.20.2"}
_BY_PYTHON: Mapping[str, Mapping[str, str]] = {
    "3.11": {MEGATRON: "0.16.1"},
    "3.12": {MEGATRON: "0.19.2"},
}
PYTHONS = tuple(_BY_PYTHON)


def this_python() -> str:
    """Returns "3.11" for Python 3.11.7."""
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def versions(python: str) -> Mapping[str, str]:
    """Returns package -> version of the tested set for a Python; empty if there is none."""
    return {**_ON_ALL, **_BY_PYTHON[python]} if python in _BY_PYTHON else {}
