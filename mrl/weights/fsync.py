"""Puts files and folders on disk before a function returns."""

from __future__ import annotations

import os


def write_synced(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a small file and puts it on disk."""
    with open(path, "wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())


def fsync_path(path: str | os.PathLike[str]) -> None:
    """Puts a file's content, or a folder's list of names, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
