"""Finds the versions of packages for GPUs, and the versions of flash-attn that a transformer-engine takes."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re

from packaging.version import InvalidVersion, Version

NOT_INSTALLED = Version("0")
"""The version of a package that is not installed; transformer-engine calls it so too."""


def version_of(package: str) -> Version:
    """Returns the version that pip knows of a package, or NOT_INSTALLED.

    A build from a changed clone may have no valid version ("2.8.3-dirty"). Then its first numbers count.
    """
    try:
        text = importlib.metadata.version(package) or ""  # of an installation that broke off it is None
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED
    try:
        return Version(text)
    except InvalidVersion:
        numbers = re.match(r"\d+(\.\d+)*", text)
        return NOT_INSTALLED if numbers is None else Version(numbers[0])


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
        if self.included:
            return f"{self.least} to {self.most}, which {self.most}+cu13 is above"
        return f"from {self.least} and below {self.most}"


def flash_attn_bounds(transformer_engine: Version | None, *, blackwell: bool) -> FlashAttnBounds:
    """Returns the bounds of a version of transformer-engine; None and NOT_INSTALLED for the newest that is known.

    Source: FlashAttentionUtils in attention/dot_product_attention/utils.py and its use in backends.py, of each release
    from 2.3 to 2.20. blackwell: compute capability 10.0 and up.
    """
    least = Version("2.7.3" if blackwell else "2.1.1")
    for since, most in (("2.19", "2.8.4"), ("2.10", "2.8.3"), ("2.6", "2.8.1"), ("0", "2.7.4.post1")):
        if transformer_engine in (None, NOT_INSTALLED) or transformer_engine >= Version(since):
            return FlashAttnBounds(least, Version(most), included=since != "2.19")
    raise AssertionError(f"{transformer_engine} is below 0")
