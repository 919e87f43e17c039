"""Finds the versions of packages for GPUs, and the versions of flash-attn that a transformer-engine takes."""

from __future__ import annotations

import dataclasses
import importlib.metadata

from packaging.version import InvalidVersion, Version

NOT_INSTALLED = Version("0")
"""The version of a package that is not installed; transformer-engine calls it so too."""


def version_of(package: str) -> Version:
    """Returns the version that pip knows of a package; NOT_INSTALLED if it is none."""
    try:
        return Version(importlib.metadata.version(package))
    except (importlib.metadata.PackageNotFoundError, InvalidVersion):
        return NOT_INSTALLED


@dataclasses.dataclass(frozen=True)
class FlashAttnBounds:
    """Holds the versions of flash-attn 2 that a transformer-engine imports; it leaves any other out, with a warning."""

    least: Version
    most: Version
    included: bool  # whether `most` is one of them

    def take(self, version: Version) -> bool:
        """Compares like transformer-engine: 2.8.3.post1 and 2.8.3+cu13 are above 2.8.3."""
        return self.least <= version and (version <= self.most if self.included else version < self.most)

    def __str__(self) -> str:
        return f"{self.least} to {self.most}" if self.included else f"from {self.least} and below {self.most}"


def flash_attn_bounds(transformer_engine: Version | None, *, blackwell: bool) -> FlashAttnBounds:
    """Returns the bounds of a version of transformer-engine; None for the newest that is known.

    Source: FlashAttentionUtils in attention/dot_product_attention/utils.py and its use in backends.py, of each release
    from 2.3 to 2.20. blackwell: compute capability 10.0 and up.
    """
    least = Version("2.7.3" if blackwell else "2.1.1")
    for since, most in (("2.19", "2.8.4"), ("2.10", "2.8.3"), ("2.6", "2.8.1")):
        if transformer_engine is None or transformer_engine >= Version(since):
            return FlashAttnBounds(least, Version(most), included=since != "2.19")
    return FlashAttnBounds(least, Version("2.7.4.post1"), included=True)
