"""Reads Hugging Face model folders shard by shard, and writes them tensor by tensor.

`WeightReader` is what each reader of weights can do, whatever files it reads: conversions and engines know no other.

Reading: headers and index are checked before any tensor is used, and nothing else is read until a slice is asked for.
Pickle files are refused: loading one runs its code. Writing: the folder is laid out beforehand from names, shapes and
dtypes. So a tensor goes straight to its place, and memory holds no more than one.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mrl.errors import ConfigError, ModelError
from mrl.weights.algebra import Shape
from mrl.weights.companions import copy_companions
from mrl.weights.fsync import fsync_path, write_synced
from mrl.weights.json_file import parse_json, read_json
from mrl.weights.pread import LazySlice, Region, TruncatedFile, read_region
from mrl.words import shorten_list

T = TypeVar("T")
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Describes a tensor as a header does."""

    dtype: str  # a safetensors name such as "BF16"
    shape: Shape
    file: str = ""  # name of the shard
    start: int = dataclasses.field(default=0, compare=False)  # its first byte there


class Slice(Protocol):
    """Is a tensor, or one that is read as far as it is indexed: `[a:b]`, `[:, a:b]`, `[i, a:b, c:d]`, and `[()]` for
    all."""

    @property
    def shape(self) -> Shape: ...

    def __getitem__(self, key: Any) -> Tensor: ...


class WeightReader(Protocol):
    """Gives the weights of a model by name, read on demand and from several threads."""

    @property
    def path(self) -> Path:
        """Returns the folder or file, for messages."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Returns the dtype and shape of each, by name."""

    def __call__(self, name: str) -> Slice:
        """Returns the tensor `name`; UserError if it is not there or its file is damaged."""

    def close(self) -> None:
        """Closes the files; tensors that were read stay valid."""


def read_header_text(file: Path) -> bytes:
    """Returns the JSON at the start of a safetensors file; ModelError if there is none."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
            why = f"truncated, a pointer of Git LFS, or not a safetensors file ({size} bytes)"
            raise ModelError(file, why=why, fix="get the file again")
        return stream.read(length)


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Returns the tensors of one safetensors file; ModelError if the file is truncated or is not one."""
    text = read_header_text(file)
    try:
        with safe_open(file, "numpy"):  # checks offsets, sizes and the end of the file
            header = parse_json(text)
        start = 8 + len(text)
        tensors = {
            name: TensorInfo(entry["dtype"], tuple(entry["shape"]), file.name, start + entry["data_offsets"][0])
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        why = f"truncated or not a safetensors file ({str(error)[:200]})"
        raise ModelError(file, why=why, fix="get the file again") from None
    return tensors


def read_index(file: Path) -> dict[str, str]:
    """Returns the index's map from tensor to shard."""
    try:
        weight_map = read_json(file)["weight_map"]
        bad = [shard for shard in set(weight_map.values()) if Path(shard).name != shard]
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelError(file, why=f"not an index of weights ({error!r})", fix="get the file again") from None
    if bad:
        raise ModelError(file, why=f"names {bad[0]}, which is not a file of this folder", fix="get the file again")
    return weight_map


def tensor_bytes(info: TensorInfo) -> int:
    """Returns bytes of a tensor of a dtype that is known."""
    return math.prod(info.shape) * DTYPES[info.dtype].itemsize


def count_groups(groups: Mapping[str, list[str]]) -> list[str]:
    """Returns those of each group that has any: how many, what they are, and the first few: `2 missing (a, b)`."""
    return [f"{len(names)} {what} ({shorten_list(names)})" for what, names in groups.items() if names]


class SafetensorsReader:
    """Reads the weights of a model folder, as a `WeightReader`. A context manager closes the
    files.

    It raises ModelError, naming the file, for a folder that is missing, incomplete, damaged, or holds no safetensors.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise ModelError(self.path, why="no such folder", fix="give a Hugging Face model folder")
        self._open: dict[str, int] = {}
        single, index = self.path / SINGLE, self.path / INDEX
        if index.is_file():
            self.tensors = self._check_index(read_index(index), index, single)
        elif single.is_file():
            self.tensors = read_header(single)
        else:
            raise ModelError(self._why_no_weights())

    def _why_no_weights(self) -> str:
        names = sorted(file.name for file in self.path.iterdir())
        pickles = [name for name in names if name.endswith(_PICKLES)]
        if pickles:
            return (
                f"{self.path}: has only pickle weights ({shorten_list(pickles)}), refused because loading them runs "
                "their code; save the model as safetensors (docs/convert.md)"
            )
        return f"{self.path}: has neither {SINGLE} nor {INDEX}; give a folder with safetensors weights"

    def _check_index(self, weight_map: dict[str, str], index: Path, single: Path) -> dict[str, TensorInfo]:
        shards = sorted(set(weight_map.values()))
        if single.is_file() and single.name not in shards:
            raise ModelError(self.path, why=f"has both {SINGLE} and {INDEX}", fix="remove the one that is out of date")
        lost = [shard for shard in shards if not (self.path / shard).is_file()]
        if lost:
            raise ModelError(
                self.path, why=f"{INDEX} names {shorten_list(lost)}, not in the folder", fix="get the missing files"
            )
        tensors: dict[str, TensorInfo] = {}
        for shard in shards:
            found = read_header(self.path / shard)
            promised = {name for name, file in weight_map.items() if file == shard}
            if found.keys() != promised:
                odd = sorted(found.keys() ^ promised)
                raise ModelError(
                    index, why=f"does not agree with {shard} about {shorten_list(odd)}", fix="get both files again"
                )
            tensors |= found
        return tensors

    def __call__(self, name: str) -> LazySlice:
        if name not in self.tensors:
            raise ModelError(self.path, why=f"has no tensor {name}")
        info = self.tensors[name]

        def read(region: Region) -> Tensor:
            try:
                file = self._file(info.file)
                return read_region(file, info.start, dtype=DTYPES[info.dtype], shape=info.shape, region=region)
            except (TruncatedFile, OSError) as error:
                raise ModelError(self.path / info.file, why=str(error), fix="get the file again") from error

        return LazySlice(info.shape, read)

    def _file(self, name: str) -> int:
        if name not in self._open:
            opened = os.open(self.path / name, os.O_RDONLY)
            if self._open.setdefault(name, opened) != opened:  # another thread was first
                os.close(opened)
        return self._open[name]

    def close(self) -> None:
        """Closes the files; tensors that were read stay valid."""
        for file in self._open.values():
            os.close(file)
        self._open.clear()

    def __enter__(self) -> "SafetensorsReader":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


_UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_size(size: int | str, key: str = "max_shard_size") -> int:
    """Returns bytes of "5GB" or "1.5GB" (powers of ten, as transformers counts), of "1GiB" (of two), or of a number.

    key: for messages.
    """
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([KMGT]i?B)?", str(size).strip(), re.IGNORECASE)
    count = int(float(match[1]) * _UNITS[(match[2] or "").upper()]) if match else 0
    if count < 1:
        raise ConfigError(key, size, "is not a size", "write it as 5GB, 500MB, 1GiB, or as a number of bytes")
    return count


def main_dtype(tensors: Mapping[str, TensorInfo]) -> torch.dtype:
    """Returns the dtype of most entries, which config.json calls the model's. A few tensors may be fp32 in any
    model."""
    entries: collections.Counter[str] = collections.Counter()
    for info in tensors.values():
        entries[info.dtype] += math.prod(info.shape)
    return DTYPES[entries.most_common(1)[0][0]]


def tensor_infos(shapes: Mapping[str, Shape], dtype: torch.dtype) -> dict[str, TensorInfo]:
    """Returns the argument of `HFWriter` for tensors that all have one dtype."""
    return {name: TensorInfo(NAMES[dtype], tuple(shape)) for name, shape in shapes.items()}


@dataclasses.dataclass(frozen=True)
class Shard:
    """Is one file to write: its header, and the byte offset in the file of each tensor."""

    header: bytes
    offsets: dict[str, int]
    size: int


def lay_out(
    tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str] | None = MappingProxyType({"format": "pt"})
) -> Shard:
    """Returns header and offsets of a file of `tensors`, in their order.

    metadata: the header's notes; None for a header without any.
    """
    entries: dict[str, Any] = {}
    at = 0
    spans = {}
    for name, info in tensors.items():
        spans[name] = at
        size = tensor_bytes(info)
        entries[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [at, at + size]}
        at += size
    notes = {} if metadata is None else {"__metadata__": dict(metadata)}
    text = json.dumps(notes | entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return Shard(
        len(text).to_bytes(8, "little") + text, {name: start + offset for name, offset in spans.items()}, start + at
    )


def split_by_bytes(items: Iterable[T], size: Callable[[T], int], limit: int) -> list[list[T]]:
    """Returns the items of each file of at most `limit` bytes; an item larger than that has a file of its own."""
    groups: list[list[T]] = [[]]
    filled = 0
    for item in items:
        if groups[-1] and filled + size(item) > limit:
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += size(item)
    return groups


def split_into_shards(tensors: Mapping[str, TensorInfo], limit: int) -> dict[str, dict[str, TensorInfo]]:
    """Returns the tensors of each file of at most `limit` bytes."""
    groups = split_by_bytes(tensors, lambda name: tensor_bytes(tensors[name]), limit)
    files = [SINGLE]
    if len(groups) > 1:
        files = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    return {file: {name: tensors[name] for name in group} for file, group in zip(files, groups, strict=True)}


def index_text(weight_map: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> str:
    """Returns the text of the index file. weight_map: the file of each of the `tensors`."""
    total = sum(map(tensor_bytes, tensors.values()))
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"


class HFWriter:
    """Writes the weights of a model folder, each tensor straight to its place in its shard, in any order.

    tensors: every tensor that will come, with dtype and shape, in the order wanted on disk (`tensor_infos`). Shards are
    cut at `max_shard_size` bytes. companions: a folder for `copy_companions`, with `config_changes`.

    Files carry a temporary name (`.NAME.part`) until `close`. That checks that every tensor came, and removes weights
    of an earlier export. The file that makes the folder loadable gets its name last, so an interrupted write never
    looks whole. A context manager closes it, or removes its parts after an error.
    """

    def __init__(
        self,
        out: str | Path,
        tensors: Mapping[str, TensorInfo],
        *,
        max_shard_size: int | str = "5GB",
        companions: str | Path | None = None,
        config_changes: Mapping[str, Any] | None = None,
    ) -> None:
        self.out = Path(out)
        self.tensors = dict(tensors)
        self._companions, self._changes = companions, config_changes
        self._shards = {
            name: lay_out(group) for name, group in split_into_shards(self.tensors, parse_size(max_shard_size)).items()
        }
        self._shard_of = {name: file for file, shard in self._shards.items() for name in shard.offsets}
        self._waiting = set(self.tensors)
        self.out.mkdir(parents=True, exist_ok=True)
        needed, free = sum(shard.size for shard in self._shards.values()), shutil.disk_usage(self.out).free
        if needed > free:
            raise ModelError(
                self.out, why=f"the model needs {needed} bytes and {free} are free on that disk", fix="make room"
            )
        for part in self.out.glob(".model*.part"):
            part.unlink()
        self._files: dict[str, int] = {}
        try:
            for name, shard in self._shards.items():
                self._files[name] = os.open(self._part(name), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
                self._write(self._files[name], memoryview(shard.header), 0)
                os.truncate(self._files[name], shard.size)
        except OSError:
            self.abort()
            raise

    def _part(self, name: str) -> Path:
        return self.out / f".{name}.part"

    @staticmethod
    def _write(file: int, data: memoryview, at: int) -> None:
        while data:
            written = os.pwrite(file, data, at)
            data, at = data[written:], at + written

    def add(self, name: str, tensor: Tensor) -> None:
        """Writes one tensor, from any device; it is cast to the planned dtype. Each name comes once."""
        info = self.tensors.get(name)
        assert info is not None, f"{self.out}: {name} was not announced to the writer"
        assert name in self._waiting, f"{self.out}: {name} was written before"
        assert tuple(tensor.shape) == info.shape, f"{self.out}: {name} is {tuple(tensor.shape)}, not {info.shape}"
        data = tensor.detach().to(device="cpu", dtype=DTYPES[info.dtype]).contiguous().reshape(-1)
        file = self._shard_of[name]
        if data.numel():
            raw = memoryview(data.view(torch.uint8).numpy())
            self._write(self._files[file], raw, self._shards[file].offsets[name])
        self._waiting.remove(name)

    def close(self) -> None:
        """Makes the folder whole."""
        if self._waiting:
            missing = shorten_list(sorted(self._waiting))
            self.abort()
            raise AssertionError(f"{self.out}: closed before {missing} came")
        for descriptor in self._files.values():
            os.fsync(descriptor)
            os.close(descriptor)
        self._files.clear()
        old = [
            file for file in self.out.glob("model*.safetensors") if file.name == SINGLE or _SHARD.fullmatch(file.name)
        ]
        for file in [self.out / INDEX, *old]:
            file.unlink(missing_ok=True)
        if self._companions is not None:
            # what is written is not quantised, whatever it was made from
            changes = {"quantization_config": None} | dict(self._changes or {})
            copy_companions(self._companions, self.out, dtype=main_dtype(self.tensors), changes=changes)
        for name in self._shards:
            os.replace(self._part(name), self.out / name)
        if len(self._shards) > 1:
            self._write_index()
        fsync_path(self.out)

    def _write_index(self) -> None:
        part = self._part(INDEX)
        write_synced(part, index_text(self._shard_of, self.tensors).encode())
        fsync_path(self.out)  # the shards have their names on disk before the index says so
        os.replace(part, self.out / INDEX)

    def abort(self) -> None:
        """Removes the written parts; weights of an earlier export stay as they were."""
        for name, file in self._files.items():
            os.close(file)
            self._part(name).unlink(missing_ok=True)
        self._files.clear()

    def __enter__(self) -> "HFWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()
