"""Computes the CRC-32 of files by zlib-ng.

At 30 GB/s nobody waits for it. Python's own zlib makes 3 GB/s, a third of a conversion's time.
"""

from __future__ import annotations

from pathlib import Path

from zlib_ng.zlib_ng import crc32

READ_BYTES = 2**22


def crc32_of(path: str | Path) -> int:
    """Returns the CRC-32 of a file."""
    checksum = 0
    with open(path, "rb", buffering=0) as source:
        while block := source.read(READ_BYTES):
            checksum = crc32(block, checksum)
    return checksum
