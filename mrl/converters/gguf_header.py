"""The header of a GGUF file: metadata, and where each tensor lies.

Read here and not by the package `gguf`, whose reader keeps an array object for every string: of a vocabulary of 150,000
tokens that is 11 s and 0.5 GB (gguf 0.19), here 0.2 s. Format: github.com/ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import dataclasses
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

from mrl.errors import ModelError

MAGIC, VERSIONS = b"GGUF", (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _LIST, _MOST_DIMS = 8, 9, 4
_KEPT = 1000
"""Lists that are longer are passed over, but for `keep`."""


@dataclasses.dataclass(frozen=True)
class Header:
    """What the header of a GGUF file says."""

    metadata: dict[str, Any]  # by key
    tensors: list[tuple[str, tuple[int, ...], int, int]]
    """Each has a name, a shape with the slowest dimension first, the number of its type, and its first byte."""


def read_header(path: Path, *, keep: tuple[str, ...] = ()) -> Header:
    """Returns the header of the file; ModelError where it is no GGUF file, damaged, or of an unknown version."""
    with path.open("rb") as stream:
        if stream.read(4) != MAGIC:
            raise ModelError(path, why="is no GGUF file", fix="give one, or a Hugging Face model folder")
        values = _Values(stream, path)
        version = values.number("I")
        if version not in VERSIONS:
            order = " (of the other byte order)" if version & 0xFFFF == 0 else ""
            raise ModelError(
                path, why=f"is GGUF of version {version}{order}", fix=f"supported are {VERSIONS}, little-endian"
            )
        count, keys = values.number("Q"), values.number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = values.string()
            if key in metadata:
                raise values.damaged(f"has {key} twice")
            value = values.of_kind(values.number("I"), key in keep)
            metadata[key] = value
        found = [values.tensor() for _ in range(count)]
        align = metadata.get("general.alignment", 32)
        if not (isinstance(align, int) and align > 0):
            raise values.damaged(f"has general.alignment {align!r}")
        start = -(-stream.tell() // align) * align
    if len({name for name, *_ in found}) != len(found):
        raise values.damaged("names a tensor twice")
    kept = {key: value for key, value in metadata.items() if value is not None}
    return Header(kept, [(name, shape, kind, start + offset) for name, shape, kind, offset in found])


class _Values:
    """The values of a header, one after the other. ModelError where the file ends before they do."""

    def __init__(self, stream: BinaryIO, path: Path) -> None:
        self.stream, self.path, self.size = stream, path, path.stat().st_size

    def damaged(self, what: str) -> ModelError:
        return ModelError(self.path, why=f"its header {what}", fix="get the file again")

    def take(self, count: int) -> bytes:
        data = self.stream.read(count) if count <= self.size else b""
        if len(data) != count:
            raise self.damaged(f"goes on past its end, at byte {self.size}")
        return data

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        try:
            return self.take(self.number("Q")).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(f"has a text that is no UTF-8 ({error.reason})") from error

    def of_kind(self, kind: int, keep: bool) -> Any:
        """Returns a value; None for a list that is passed over."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _LIST:
            raise self.damaged(f"has a value of kind {kind}, which is not known")
        of, count = self.number("I"), self.number("Q")
        kept = keep or count <= _KEPT
        if of in _SCALARS:
            code = f"{count}{_SCALARS[of]}"
            if count * struct.calcsize(_SCALARS[of]) > self.size:
                raise self.damaged(f"goes on past its end, at byte {self.size}")
            data = self.take(struct.calcsize(code))
            return list(struct.unpack(f"<{code}", data)) if kept else None
        if of != _STRING:
            raise self.damaged(f"has a list of kind {of}, which is not supported")
        if kept:
            return [self.string() for _ in range(count)]
        for _ in range(count):
            length = self.number("Q")
            if length > self.size:
                raise self.damaged(f"goes on past its end, at byte {self.size}")
            self.stream.seek(length, os.SEEK_CUR)
        return None

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dims = self.string(), self.number("I")
        shape = [self.number("Q") for _ in range(dims)] if 1 <= dims <= _MOST_DIMS else []
        if not shape or not all(0 < size < 2**40 for size in shape):
            raise self.damaged(f"gives {name} the shape {shape[::-1]} of {dims} dimensions")
        return name, tuple(reversed(shape)), self.number("I"), self.number("Q")
