"""Packages that are used where they are installed and load. Neither they nor torch are imported with this module.

`mrl.mcore_models.platform` asks here for the process that trains, `mrl doctor` for a process that may end by it.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Literal

from packaging.version import Version

from mrl.errors import one_line

ABSENT = "is not installed"

MODULES: Mapping[str, Sequence[str]] = {
    "transformer_engine": ("transformer_engine.pytorch",),
    "apex": ("amp_C", "apex.optimizers", "apex.multi_tensor_apply"),
}
"""Package -> the modules of it that megatron-core takes for granted: one that lacks them is not used."""

NOT_THERE = Version("0")
"""The version of a package that is not installed; transformer-engine calls it so too."""


def version_of(package: str) -> Version:
    """Returns the version that pip knows of a package; NOT_THERE where it knows none."""
    try:
        return Version(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return NOT_THERE


@dataclasses.dataclass(frozen=True)
class FlashAttnBounds:
    """The versions of flash-attn 2 that a transformer-engine imports; it leaves any other out, with a warning."""

    least: Version
    most: Version
    included: bool  # whether `most` is one of them

    def take(self, version: Version) -> bool:
        """As transformer-engine compares: 2.8.3.post1 and 2.8.3+cu13 are above 2.8.3."""
        return self.least <= version and (version <= self.most if self.included else version < self.most)

    def __str__(self) -> str:
        if self.included:
            return f"{self.least} to {self.most} (which {self.most}+cu13 is above)"
        return f"from {self.least} and below {self.most}"


def flash_attn_bounds(transformer_engine: Version | None, *, blackwell: bool) -> FlashAttnBounds:
    """Returns what a version of transformer-engine takes; None for the newest that is known.

    Source: FlashAttentionUtils in attention/dot_product_attention/utils.py and its use in backends.py, of each release
    from 2.3 to 2.20. blackwell: compute capability 10.0 and up.
    """
    least = Version("2.7.3" if blackwell else "2.1.1")
    for since, most in (("2.19", "2.8.4"), ("2.10", "2.8.3"), ("2.6", "2.8.1"), ("0", "2.7.4.post1")):
        if transformer_engine is None or transformer_engine >= Version(since):
            return FlashAttnBounds(least, Version(most), included=since != "2.19")
    raise AssertionError(f"{transformer_engine} is below 0")


def fault_of(package: str) -> str | None:
    """Returns why a package of `MODULES` cannot be used; None where it can. It is found by importing it: the package
    may lack its extension for torch, or be built for another torch or CUDA."""
    if importlib.util.find_spec(package) is None or mere_folder(package) is not None:
        return ABSENT
    try:
        with warnings.catch_warnings(action="ignore"):
            for module in MODULES[package]:
                importlib.import_module(module)
    except Exception as error:  # an import of C++ libraries fails as it likes: ImportError, OSError, RuntimeError
        return one_line(f"{type(error).__name__}: {error}", 160)
    return None


def mere_folder(package: str) -> pathlib.Path | None:
    """Returns the folder that Python takes for a package though it has no __init__.py, as a clone of a repository in
    the current folder; None where the package is one, or nothing of that name is found."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is not None:
        return None
    return next((pathlib.Path(folder) for folder in spec.submodule_search_locations or ()), None)


Apex = Literal["NVIDIA's", "PyPI's", "another"]


def whose_apex() -> Apex:
    """Returns whose the package is that Python finds as apex, by its files: NVIDIA's has the folder multi_tensor_apply
    however it was built, and PyPI's is for the web framework Pyramid, which it imports first of all."""
    spec = importlib.util.find_spec("apex")
    assert spec is not None, "apex is not installed"
    folders = [pathlib.Path(folder) for folder in spec.submodule_search_locations or ()]
    if any((folder / f"multi_tensor_apply{end}").exists() for folder in folders for end in ("", ".py")):
        return "NVIDIA's"
    first = pathlib.Path(spec.origin or "")
    is_pypis = first.is_file() and b"pyramid" in first.read_bytes()
    return "PyPI's" if is_pypis else "another"
