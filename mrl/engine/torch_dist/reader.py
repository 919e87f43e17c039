"""Reads a distributed checkpoint in torch's format (`torch_dist`, FSDP's) with no process group and no megatron.

A folder holds `.metadata`, a pickle with the place of each part of each tensor, and data files. An item of a data file
is what `torch.save` writes: a zip archive with one storage, not compressed. Pickles are read by an unpickler that
knows the few classes of the format and runs nothing else. Tensor bytes are read with `pread` when they are asked for,
so memory holds no more than that.

Format: `torch/distributed/checkpoint/{metadata,filesystem}.py` of torch 2.13, `torch/serialization.py`.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import os
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl.engine.torch_dist.data_files import STORAGES
from mrl.errors import CheckpointError, first_line
from mrl.weights.algebra import Shape
from mrl.weights.pread import read_region

METADATA = ".metadata"
_FORMAT = "torch.distributed.checkpoint."
_OLD_MCORE = "megatron.core.dist_checkpointing.strategies.torch"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_STORAGES = {storage.__name__: dtype for dtype, storage in STORAGES.items()}


class _Record:
    """Stands for an object of the format: its fields as attributes, or whatever state its class had as `state`."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes of `.metadata`, as records; refuses every other."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith(_FORMAT) or (module == _OLD_MCORE and name.startswith("MCore")):
            return _Record
        if module == "pathlib" or (module, name) == ("torch.serialization", "_get_layout"):
            return lambda *_: None
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no part of the format")


class _TensorUnpickler(pickle.Unpickler):
    """Reads `data.pkl` of a saved tensor as (shape, strides, storage offset, (dtype, key of its storage))."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, size, stride, *_: (tuple(size), tuple(stride), offset, storage)
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no part of a tensor")

    def persistent_load(self, pid: Any) -> tuple[torch.dtype, str]:
        return pid[1], pid[2]


class _Span(io.RawIOBase):
    """Bytes `start` to `start + length` of an open file, as a file."""

    def __init__(self, file: int, start: int, length: int) -> None:
        self.file, self.start, self.length, self.at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.length}[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self.length - self.at)
        data = os.pread(self.file, max(wanted, 0), self.start + self.at)
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A part of a tensor: its first entry in the whole, its shape, and the item that holds it."""

    offsets: Shape
    sizes: Shape
    file: str
    start: int
    length: int


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, and its parts in the order of their first entries."""

    dtype: torch.dtype
    shape: Shape
    chunks: tuple[Chunk, ...]


class TorchDistReader:
    """Reads the tensors of the folder `path`, by their key in the checkpoint. Safe to use from several threads.

    Raises CheckpointError, naming the folder, if it is missing, incomplete or damaged. The checkpoint's checksums,
    and not this, find changed bytes of a tensor. objects: keys of what is no tensor.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.tensors: Mapping[str, StoredTensor] = {}
        self.objects: list[str] = []
        file = self.path / METADATA
        if not file.is_file():
            raise CheckpointError(
                self.path, why=f"has no {METADATA}", fix="it is no distributed checkpoint, or not a whole one"
            )
        try:
            with file.open("rb") as stream:
                self._take(_MetadataUnpickler(stream).load())
        except Exception as error:  # a damaged pickle raises anything
            raise CheckpointError(
                file, why=f"cannot be read ({first_line(error)})", fix="get the checkpoint again"
            ) from error

    def _take(self, metadata: Any) -> None:
        where = {}
        tensors: dict[str, StoredTensor] = {}
        for index, info in metadata.storage_data.items():
            offset = index.__dict__.get("offset")
            where[index.fqn, None if offset is None else tuple(offset)] = info
        for key, stored in metadata.state_dict_metadata.items():
            if not hasattr(stored, "chunks"):
                self.objects.append(key)
                continue
            chunks = []
            for chunk in stored.chunks:
                info = where[key, tuple(chunk.offsets)]
                if info.__dict__.get("transform_descriptors"):
                    raise ValueError(f"{key} is stored with {info.transform_descriptors}, which is not supported")
                if Path(info.relative_path).name != info.relative_path:
                    raise ValueError(f"{key} is said to be in {info.relative_path!r}, which is no file of this folder")
                sizes = tuple(chunk.sizes)
                chunks.append(Chunk(tuple(chunk.offsets), sizes, info.relative_path, info.offset, info.length))
            chunks.sort(key=lambda chunk: chunk.offsets)
            tensor = StoredTensor(stored.properties.state[0], tuple(stored.size), tuple(chunks))
            _check_cover(key, tensor)
            tensors[key] = tensor
        self.tensors = tensors

    def read(self, key: str, region: Sequence[tuple[int, int]]) -> Tensor:
        """Returns, in new memory, entries `region[d][0]` to `region[d][1]` in each dimension d of the tensor `key`."""
        stored, parts = self.tensors[key], []
        for chunk in stored.chunks:
            both = _overlap(chunk, region)
            if both is not None:
                inside = [(first, first + n) for first, _, n in both]
                parts.append((chunk, inside, tuple(slice(at, at + n) for _, at, n in both)))
        sizes = [stop - start for start, stop in region]
        if len(parts) == 1 and [part.stop - part.start for part in parts[0][2]] == sizes:
            return self._chunk(key, stored.dtype, *parts[0][:2])
        whole = torch.empty(sizes, dtype=stored.dtype)
        for chunk, inside, there in parts:
            whole[there] = self._chunk(key, stored.dtype, chunk, inside)
        return whole

    def _chunk(self, key: str, dtype: torch.dtype, chunk: Chunk, region: Sequence[tuple[int, int]]) -> Tensor:
        """Reads a region of one chunk."""
        path = self.path / chunk.file
        try:
            with path.open("rb") as file:
                at = _place(file.fileno(), dtype, chunk)
                return read_region(file.fileno(), at, dtype=dtype, shape=chunk.sizes, region=region)
        except Exception as error:  # a damaged archive raises anything
            raise CheckpointError(
                path, why=f"{key} cannot be read ({first_line(error)})", fix="get the checkpoint again"
            ) from error


def _place(file: int, dtype: torch.dtype, chunk: Chunk) -> int:
    """Returns the place of a chunk's first byte in its open file. Raises ValueError for another tensor's archive."""
    with (
        io.BufferedReader(_Span(file, chunk.start, chunk.length)) as span,
        zipfile.ZipFile(span) as archive,
    ):
        root = archive.namelist()[0].split("/")[0]
        saved = _TensorUnpickler(io.BytesIO(archive.read(f"{root}/data.pkl"))).load()
        shape, strides, offset, (stored, storage) = saved
        info = archive.getinfo(f"{root}/data/{storage}")
        span.seek(info.header_offset + 26)
        lengths = span.read(4)
    if (
        shape != chunk.sizes
        or strides != torch.empty(shape, device="meta").stride()
        or info.compress_type != zipfile.ZIP_STORED
    ):
        raise ValueError(f"holds a tensor of shape {list(shape)} and strides {list(strides)}")
    if stored != dtype:
        raise ValueError(f"holds a tensor of {stored}, and {METADATA} says {dtype}")
    if info.file_size < (offset + math.prod(shape)) * dtype.itemsize:
        raise ValueError(f"holds {info.file_size} bytes for {math.prod(shape)} entries of {dtype}")
    header = 30 + sum(int.from_bytes(lengths[i : i + 2], "little") for i in (0, 2))
    return chunk.start + info.header_offset + header + offset * dtype.itemsize


def _overlap(chunk: Chunk, region: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]] | None:
    """Returns for each dimension (first entry in the chunk, first entry in the region, count); None if apart."""
    both = []
    for low, size, (start, stop) in zip(chunk.offsets, chunk.sizes, region, strict=True):
        first, last = max(low, start), min(low + size, stop)
        if first >= last:
            return None
        both.append((first - low, first - start, last - first))
    return both


def _check_cover(key: str, tensor: StoredTensor) -> None:
    """Raises ValueError unless the parts lie inside the whole, apart, and have all of its entries."""
    for chunk in tensor.chunks:
        ends = zip(chunk.offsets, chunk.sizes, tensor.shape, strict=True)
        if any(low < 0 or size < 0 or low + size > whole for low, size, whole in ends):
            raise ValueError(f"{key} has a part at {chunk.offsets} that is not inside its shape {tensor.shape}")
    in_parts = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
    if in_parts != math.prod(tensor.shape):
        raise ValueError(f"{key} has {math.prod(tensor.shape)} entries and its parts have {in_parts}")
    regions = [
        [(low, low + size) for low, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        for chunk in tensor.chunks
        if 0 not in chunk.sizes
    ]
    if not _lie_apart(regions):
        raise ValueError(f"{key} has parts that lie over one another")
    if len({chunk.offsets for chunk in tensor.chunks}) != len(tensor.chunks):  # with one that is empty
        raise ValueError(f"{key} has two parts at one place")


def _lie_apart(regions: list[list[tuple[int, int]]]) -> bool:
    """Returns whether no two regions, none of them empty, have an entry in common.

    Where runs of the first dimension are the same or apart, as layers and experts are, each is looked at alone. So a
    checkpoint of many thousand parts takes no time that counts.
    """
    if len(regions) < 2 or not regions[0]:
        return len(regions) < 2
    runs: dict[tuple[int, int], list[list[tuple[int, int]]]] = {}
    for first, *others in regions:
        runs.setdefault(first, []).append(others)
    if all(one[1] <= other[0] for one, other in itertools.pairwise(sorted(runs))):
        return all(map(_lie_apart, runs.values()))
    near: list[list[tuple[int, int]]] = []  # those that may meet the next one in the first dimension
    for region in sorted(regions):
        near = [other for other in near if other[0][1] > region[0][0]]
        for other in near:
            if all(low < end and start < high for (low, high), (start, end) in zip(other, region, strict=True)):
                return False
        near.append(region)
    return True
