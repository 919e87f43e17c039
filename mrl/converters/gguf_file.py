"""GGUF files (llama.cpp's), read with bounded memory through the package `gguf`, which `pip install gguf` brings.

The package turns blocks of a quantised type into numbers; rows are read here, with `pread`, when they are asked for.
F32, F16, BF16 and F64 come as they are stored, every quantised type as bf16.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mrl.converters.algebra import Shape
from mrl.converters.gguf_header import read_header
from mrl.converters.pread import LazySlice, Region, ShortFile, read_bytes
from mrl.converters.safetensors_io import DTYPES, TensorInfo
from mrl.errors import ConfigError, ModelError

TOKENS = "tokenizer.ggml.tokens"
PLAIN = ("F32", "F16", "BF16", "F64")
QUANTISED_AS = "BF16"


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor of the file."""

    type: str  # ggml's name, such as "Q4_0"
    shape: Shape  # slowest dimension first
    start: int  # its first byte
    row_bytes: int

    @property
    def dtype(self) -> str:
        """What it is read as."""
        return self.type if self.type in PLAIN else QUANTISED_AS


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """The header of a GGUF file."""

    path: Path
    metadata: dict[str, Any]  # by key
    tensors: dict[str, Stored]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a Hugging Face tensor lies in the file."""

    name: str  # of the file's tensor
    shape: Shape  # of the Hugging Face tensor
    expert: int = 0  # its number in a stack
    heads: int | None = None  # of a query or key projection whose rows llama.cpp has put in its own order


def package(path: Path) -> ModuleType:
    """Returns the package `gguf`; ConfigError where it is not installed."""
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(path, why="a GGUF file needs the package gguf", fix="install it with pip install gguf")
    return importlib.import_module("gguf")


def read_gguf(path: Path) -> GGUFFile:
    """Returns the header of the file, checked against its size; ModelError where it is no GGUF file, damaged, or one
    part of several.
    """
    header = read_header(path, keep=(TOKENS,))
    parts = header.metadata.get("split.count", 0)
    if parts > 1:
        raise ModelError(
            path, why=f"is one of {parts} parts", fix="join them with `llama-gguf-split --merge` and give the whole"
        )
    gguf = package(path)
    tensors = {name: _stored(path, gguf, name, kind, shape, start) for name, shape, kind, start in header.tensors}
    _check_spans(path, tensors)
    return GGUFFile(path, header.metadata, tensors)


def _stored(path: Path, gguf: ModuleType, name: str, number: int, shape: Shape, start: int) -> Stored:
    version = importlib.metadata.version("gguf")
    try:
        kind = gguf.GGMLQuantizationType(number)
    except ValueError:
        raise ModelError(
            path, why=f"{name} is of type {number}, which gguf {version} does not know", fix="install a newer one"
        ) from None
    block, size = gguf.GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise ModelError(
            path, why=f"{name} has rows of {shape[-1]} in {kind.name}, whose blocks have {block}", fix="get it again"
        )
    if kind.name not in PLAIN:
        try:
            gguf.dequantize(torch.zeros(1, size, dtype=torch.uint8).numpy(), kind)
        except NotImplementedError:
            raise ModelError(
                path,
                why=f"{name} is of type {kind.name}, which gguf {version} cannot turn into numbers",
                fix="quantise the model anew in another type, such as Q8_0",
            ) from None
    return Stored(kind.name, shape, start, shape[-1] // block * size)


def _check_spans(path: Path, tensors: Mapping[str, Stored]) -> None:
    """Tensors lie one after the other, inside the file."""
    end, size = 0, path.stat().st_size
    for name, stored in sorted(tensors.items(), key=lambda item: item[1].start):
        if stored.start < end:
            raise ModelError(path, why=f"{name} lies over another tensor", fix="get the file again")
        end = stored.start + math.prod(stored.shape[:-1]) * stored.row_bytes
    if end > size:
        raise ModelError(path, why=f"has {size} bytes, its header promises {end}", fix="get the file again")


class GGUFWeights:
    """The tensors of `file` under Hugging Face names, as a `WeightReader`.

    places: of each name. unmapped: tensors of the file that no name stands for, which are shown under their own.
    """

    def __init__(self, file: GGUFFile, places: Mapping[str, Place], unmapped: list[str]) -> None:
        self.path, self._file, self._places = file.path, file, dict(places)
        self._gguf = package(file.path)
        self._descriptor = os.open(file.path, os.O_RDONLY)
        stored = file.tensors
        self.tensors = {
            name: TensorInfo(stored[place.name].dtype, place.shape, file.path.name) for name, place in places.items()
        }
        for name in unmapped:
            shown = f"{name} of the file" if name in places else name
            self.tensors[shown] = TensorInfo(stored[name].dtype, stored[name].shape, file.path.name)

    def __call__(self, name: str) -> LazySlice:
        if name not in self._places:
            raise ModelError(self.path, why=f"has no tensor {name}")
        place = self._places[name]
        return LazySlice(place.shape, lambda region: self._region(place, region))

    def _region(self, place: Place, region: Region) -> Tensor:
        if len(place.shape) == 1:
            ((first, last),) = region
            return self._rows(place, 0, 1)[0, first:last]
        (first, last), columns = region
        return self._rows(place, first, last)[:, slice(*columns)]

    def _rows(self, place: Place, first: int, last: int) -> Tensor:
        """Returns rows of the Hugging Face tensor; one that has a single dimension is a row."""
        rows = place.shape[0] if len(place.shape) > 1 else 1
        if place.heads is None:
            return self._stored_rows(place, place.expert * rows + first, place.expert * rows + last)
        head = rows // place.heads
        low, high = first // head, -(-last // head)
        found = self._stored_rows(place, low * head, high * head)
        # llama.cpp turns neighbours, transformers the halves of a head: it has put row (half, i) of a head at (i, half)
        found = found.view(high - low, head // 2, 2, -1).transpose(1, 2).reshape(found.shape)
        return found[first - low * head : last - low * head]

    def _stored_rows(self, place: Place, first: int, last: int) -> Tensor:
        stored = self._file.tensors[place.name]
        shape = last - first, stored.shape[-1]
        if not math.prod(shape):
            return torch.empty(shape, dtype=DTYPES[stored.dtype])
        try:
            data = read_bytes(self._descriptor, stored.start + first * stored.row_bytes, shape[0] * stored.row_bytes)
        except (ShortFile, OSError) as error:
            raise ModelError(self.path, why=str(error), fix="get the file again") from error
        if stored.type in PLAIN:
            return torch.frombuffer(data, dtype=DTYPES[stored.dtype]).view(shape)
        blocks = torch.frombuffer(data, dtype=torch.uint8).view(shape[0], stored.row_bytes).numpy()
        numbers = self._gguf.dequantize(blocks, self._gguf.GGMLQuantizationType[stored.type])
        return torch.from_numpy(numbers).view(shape).to(DTYPES[QUANTISED_AS])

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
