"""Reads the files of `torch.save` without running code in them, and writes them at once or not at all.

A checkpoint keeps the checksums of its files in COMPLETE. Any other `.pt` has those that torch writes of each record of
its zip archive.
"""

from __future__ import annotations

import contextlib
import os
import re
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, BinaryIO

import torch

from mrl.errors import CheckpointError


def load_pt(path: str | Path, *, fields: Collection[str] = (), mmap: bool = False) -> Any:
    """Returns the content of a `torch.save` file: tensors and plain values. Code in the file is refused.

    fields: the content is a dict that has them. mmap: tensors stay in the file until they are used. Raises
    CheckpointError.
    """
    try:
        if not zipfile.is_zipfile(path):  # torch would try older formats, and warn about each
            os.stat(path)
            raise EOFError("it is cut off, or none that torch.save of version 1.6 or newer wrote")
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except MemoryError:
        raise
    except Exception as error:  # torch has no common class for what a file can have wrong
        raise _unreadable(path, refusal_reason(error)) from None
    if fields and not (isinstance(content, dict) and content.keys() >= set(fields)):
        raise _unreadable(path, f"it has no {', '.join(fields)}")
    return content


def read_pt(path: str | Path, *, fields: Collection[str] = (), mmap: bool = False) -> Any:
    """Reads a file of `write_pt` like `load_pt`, and first compares each record with its checksum.

    Padding and some zip fields have none: a changed bit there is not found.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            changed = archive.testzip()
    except Exception as error:  # zipfile has no common class for what an archive can have wrong
        raise _unreadable(path, refusal_reason(error)) from None
    if changed is not None:
        raise _unreadable(path, "its content has changed since it was written")
    return load_pt(path, fields=fields, mmap=mmap)


def write_pt(path: str | Path, content: Any) -> None:
    """Writes a `torch.save` file, at once or not at all. Raises OSError, as for a full disk."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as out:
            stream = _Stream(out)
            torch.save(content, stream)
            stream.finish()
            os.fsync(out.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


class _Stream:
    """Takes the bytes of `torch.save`. It keeps an OSError for `finish`: torch would make a RuntimeError of it."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        if self._error is None:
            try:
                self._out.write(data)
            except OSError as error:
                self._error = error
        return len(data)

    def flush(self) -> None:
        """Does nothing; torch asks a file for it, and `finish` does it."""

    def finish(self) -> None:
        if self._error is not None:
            raise self._error
        self._out.flush()


def _unreadable(path: str | Path, why: str) -> CheckpointError:
    return CheckpointError(path, why=f"cannot be read ({why})", fix="use another checkpoint")


def refusal_reason(error: Exception) -> str:
    """Returns why a `.pt` was refused, in words of ours: torch advises to run the code that a file holds."""
    code = re.search(r"nsupported (?:GLOBAL|global: GLOBAL) (\S+)", str(error))
    if code is not None:
        return f"it calls {code[1]}, which is code and no tensor"
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    if type(error) is EOFError:
        return str(error)
    return f"it is damaged, or holds more than tensors: {type(error).__name__}"
