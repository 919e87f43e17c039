"""Reads the files of `torch.save` without running code in them, and writes them with a checksum outside checkpoints.

A checkpoint keeps the checksums of its files in COMPLETE. Any other `.pt` keeps its own in the comment of its zip
archive, so torch and an older mrl read the file as before.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import struct
import zipfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, BinaryIO

import torch

from mrl.errors import CheckpointError
from mrl.weights.checksums import crc32, crc32_of

logger = logging.getLogger(__name__)

_TAIL = struct.Struct("<H8sQI")  # the length of the comment, and the comment: _MAGIC, bytes before the tail, their CRC
_MAGIC = b"mrl-crc1"
_END = struct.Struct("<4s16xH")  # the last record of an archive: its signature, and the length of its comment


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


def read_pt(
    path: str | Path, *, fields: Collection[str] = (), mmap: bool = False, say: Callable[[str], object] = logger.warning
) -> Any:
    """Reads a file of `write_pt` like `load_pt`, and first compares all of it with its checksum.

    say: gets a line on a file of an older mrl, which has no checksum and is taken as it is.
    """
    if not _is_checked(path):
        say(f"{path}: an older mrl wrote it without a checksum; it is taken as it is")
    return load_pt(path, fields=fields, mmap=mmap)


def write_pt(path: str | Path, content: Any) -> None:
    """Writes a `torch.save` file with a checksum, at once or not at all. Raises OSError, as for a full disk."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as out:
            stream = _Stream(out)
            torch.save(content, stream)
            stream.seal()
            os.fsync(out.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


class _Stream:
    """Takes the bytes of `torch.save`. It keeps an OSError for `seal`: torch would make a RuntimeError of it."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._size = self._crc = 0
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        if self._error is None:
            try:
                self._out.write(data)
            except OSError as error:
                self._error = error
        self._size, self._crc = self._size + len(data), crc32(data, self._crc)
        return len(data)

    def flush(self) -> None:
        """Does nothing; torch asks a file for it, and `seal` does it."""

    def seal(self) -> None:
        """Writes the tail over the length of the comment, the archive's last two bytes, which are zero."""
        if self._error is not None:
            raise self._error
        self._out.seek(-2, os.SEEK_END)
        self._out.write(_TAIL.pack(_TAIL.size - 2, _MAGIC, self._size - 2, self._crc))
        self._out.flush()


def _is_checked(path: str | Path) -> bool:
    """Returns False for a file of an older mrl. Raises CheckpointError if a file is not as it was written."""
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            file.seek(max(0, size - _TAIL.size))
            tail = file.read()
            file.seek(max(0, size - _END.size))
            end = file.read()
        if len(end) == _END.size and _END.unpack(end) == (b"PK\5\6", 0):
            return False
        whole = len(tail) == _TAIL.size and _TAIL.unpack(tail)[:3] == (_TAIL.size - 2, _MAGIC, size - _TAIL.size)
        if whole and crc32(b"\0\0", crc32_of(path, size=size - _TAIL.size)) == _TAIL.unpack(tail)[3]:
            return True
    except OSError as error:
        raise _unreadable(path, refusal_reason(error)) from None
    raise _unreadable(path, "its content has changed since it was written, or it is cut off")


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
