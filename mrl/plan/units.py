"""Bytes, seconds and FLOPs in the unit that suits their size, for people to read."""

from __future__ import annotations

_BYTES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_FLOPS = ((1e12, "TFLOPs"), (1e9, "GFLOPs"), (1e6, "MFLOPs"), (1e3, "kFLOPs"))


def byte_unit(largest: float) -> tuple[int, str]:
    """Returns the unit of a column whose largest value this is: how many bytes it has, and its name."""
    return next((unit for unit in _BYTES if largest >= unit[0]), _BYTES[-1])


def size(count: float) -> str:
    """Returns "5.72 GiB", "320.00 KiB" or "12 bytes"."""
    scale, name = byte_unit(count)
    return f"{count / scale:.2f} {name}" if scale > 1 else f"{count:.0f} {name}"


def duration(seconds: float) -> str:
    """Returns "7.83 s", "12.40 ms" or "3.10 us"."""
    scale, name = next((unit for unit in _SECONDS if seconds >= unit[0]), _SECONDS[-1])
    return f"{seconds / scale:.2f} {name}" if seconds else "0 s"


def flops(count: float) -> str:
    scale, name = next((unit for unit in _FLOPS if count >= unit[0]), _FLOPS[-1])
    return f"{count / scale:.2f} {name}"
