"""Boxes: a rank's parts of a checkpoint's tensors, written from the memory in use and read into it, block by block.

A box is a part of a tensor: a range in each dimension. A rank's parameter is made of one or a few of them. So is any
run of its entries; a data-parallel rank has such a run of the optimizer's state. No rank needs another one's data: it
writes a data file of its own (data_files.py), and reads its boxes from all of them (reader.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from mrl.engine.torch_dist.data_files import Item, ItemFile, extra_state_keys, saved_bytes
from mrl.engine.torch_dist.reader import TorchDistReader
from mrl.errors import CheckpointError
from mrl.weights.algebra import Shape

BLOCK_BYTES = 2**24
"""Bytes that go to or from a file at once. Two or three such blocks are what a save or a load needs of host memory,
however large the model is, beside the list of what is in the files."""


@dataclasses.dataclass(frozen=True)
class Box:
    """A part of the tensor `key` of a checkpoint, and this rank's memory for it."""

    key: str
    whole: Shape  # of the tensor `key`
    offsets: Shape  # where the part begins in it
    data: Tensor  # the part: a view of memory in use, with any strides
    padded: bool = False  # the tensor ends with rows of padding, of which each layout has another number


@dataclasses.dataclass(frozen=True)
class PlacedTensor:
    """A contiguous tensor of this rank, and its place in a checkpoint."""

    tensor: Tensor
    boxes: tuple[Box, ...]  # views of it, which it is made of
    replica: tuple[int, ...]  # megatron's replica_id: all zeros on one of the ranks that hold the same; the last number
    # is the data-parallel rank

    def __post_init__(self) -> None:
        own = self.tensor.untyped_storage()._cdata
        copies = [box.key for box in self.boxes if box.data.untyped_storage()._cdata != own]
        assert not copies, f"{copies} would be read into copies"

    def of_entries(self, span: slice, memory: Tensor, prefix: str) -> Iterator[Box]:
        """Yields the boxes of entries `span` of the flattened tensor, for other numbers of the same places.

        memory: [entries] where they are; prefix: what stands before their keys.
        """
        for box in self.boxes:
            start = box.data.storage_offset() - self.tensor.storage_offset()
            sizes, strides = tuple(box.data.shape), box.data.stride()
            assert _ascending(sizes, strides), f"{box.key}: sizes {sizes}, strides {strides}"
            first, last = (_entries_below(sizes, strides, limit - start) for limit in (span.start, span.stop))
            for at, part in boxes_of_run(sizes, first, last):
                offset = start - span.start + sum(a * s for a, s in zip(at, strides, strict=True))
                data = memory.as_strided(part, strides, memory.storage_offset() + offset)
                yield Box(prefix + box.key, box.whole, _added(box.offsets, at), data, box.padded)


def boxes_of_run(sizes: Shape, first: int, last: int) -> Iterator[tuple[Shape, Shape]]:
    """Yields (offsets, sizes) of the boxes that entries `first` to `last` of a row-major tensor are, in order.

    They are at most 2 * dimensions - 1: the end of a row, whole rows, and the beginning of a row.
    """
    if first >= last:
        return
    if len(sizes) < 2:
        yield ((first,), (last - first,)) if sizes else ((), ())
        return
    row = math.prod(sizes[1:])
    while first < last:
        index, start = divmod(first, row)
        if start == 0 and last - first >= row:
            rows = (last - first) // row
            yield (index, *(0 for _ in sizes[1:])), (rows, *sizes[1:])
            first += rows * row
        else:
            end = min(last, (index + 1) * row)
            for at, part in boxes_of_run(sizes[1:], start, end - index * row):
                yield (index, *at), (1, *part)
            first = end


def _entries_below(sizes: Shape, strides: Shape, limit: int) -> int:
    """Returns how many entries of a view lie before place `limit` of its memory: in row-major order the first ones."""
    if limit <= 0:
        return 0
    if not sizes:
        return 1
    begun = sizes[0] if sizes[0] < 2 else min(sizes[0], -(-limit // strides[0]))
    if not begun:
        return 0
    rest = _entries_below(sizes[1:], strides[1:], limit - (begun - 1) * strides[0])
    return (begun - 1) * math.prod(sizes[1:]) + rest


def _ascending(sizes: Shape, strides: Shape) -> bool:
    """Returns whether the entries of a view, in row-major order, lie one after the other in memory."""
    last = 0  # place of the last entry of a row
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size > 1 and stride <= last:
            return False
        last += (size - 1) * stride if size > 1 else 0
    return True


def _added(one: Shape, other: Shape) -> Shape:
    return tuple(a + b for a, b in zip(one, other, strict=True))


def blocks(data: Tensor) -> Iterator[tuple[Shape, Tensor]]:
    """Yields (offsets, part) of runs of rows of at most BLOCK_BYTES, or of one entry, in row-major order."""
    nowhere = tuple(0 for _ in data.shape)
    if not data.dim() or data.numel() * data.itemsize <= BLOCK_BYTES:
        yield nowhere, data
        return
    rows = BLOCK_BYTES // (data[0].numel() * data.itemsize)
    if rows:
        for start in range(0, len(data), rows):
            yield (start, *nowhere[1:]), data[start : start + rows]
        return
    for index in range(len(data)):
        for at, part in blocks(data[index]):
            yield (index, *at), part[None]


@dataclasses.dataclass(frozen=True)
class WrittenFile:
    """The data file of one rank, once it is written."""

    file: str  # its name
    items: list[Item]
    tensors: dict[str, tuple[torch.dtype, Shape]]  # key -> what the whole tensor is


def write(path: Path, boxes: Iterable[Box]) -> WrittenFile:
    """Writes a data file and puts it on disk."""
    written = WrittenFile(path.name, [], {})
    file = ItemFile(path)
    try:
        for box in boxes:
            sizes, dtype = tuple(box.data.shape), box.data.dtype
            written.tensors[box.key] = dtype, box.whole
            written.items.append(file.tensor(box.key, box.offsets, sizes, dtype, _on_host(box.data)))
        file.close()
    except BaseException:
        file.abort()
        raise
    return written


def write_index(folder: Path, everyone: Iterable[WrittenFile]) -> None:
    """Makes the data files of all ranks a checkpoint. Raises CheckpointError if a part of a tensor is missing."""
    tensors: dict[str, tuple[torch.dtype, Shape]] = {}
    items: dict[str, list[Item]] = {}
    for written in everyone:
        differ = {key for key in tensors.keys() & written.tensors if tensors[key] != written.tensors[key]}
        assert not differ, f"ranks do not agree about {sorted(differ)}"
        tensors |= written.tensors
        items[written.file] = written.items
    # megatron asks for its modules' extra state when it loads, though they have none
    asked_for = extra_state_keys(
        {key: shape for key, (_, shape) in tensors.items() if not key.startswith("optimizer.")}
    )
    name = f"__0_{len(items)}.distcp"
    file = ItemFile(folder / name)
    items[name] = [file.add_empty(key) for key in asked_for]
    file.close()
    write_metadata(folder, tensors, items, asked_for)
    TorchDistReader(folder)  # an error if a part is missing


def _on_host(data: Tensor) -> Iterator[Tensor]:
    """Yields copies. Memory that numpy gave to a file can no longer be resized, and so not offloaded."""
    for _, block in blocks(data):
        yield block.to("cpu", copy=True, memory_format=torch.contiguous_format)


def fill(reader: TorchDistReader, boxes: Iterable[Box]) -> None:
    """Reads into the memory of the boxes; `check` has found each of them in the checkpoint."""
    for box in boxes:
        stored = reader.tensors[box.key].shape
        for at, block in blocks(box.data):
            start = _added(box.offsets, at)
            ends = [min(low + size, end) for low, size, end in zip(start, block.shape, stored, strict=True)]
            there = [max(0, end - low) for low, end in zip(start, ends, strict=True)]
            if list(block.shape) != there:
                block.zero_()
            if all(there):
                read = reader.read(box.key, list(zip(start, ends, strict=True)))
                block[tuple(slice(size) for size in there)].copy_(read)


def check(reader: TorchDistReader, boxes: Iterable[Box]) -> None:
    """Raises CheckpointError if a tensor is not in the checkpoint, or has another shape there."""
    for box in boxes:
        stored = reader.tensors.get(box.key)
        if stored is None:
            raise CheckpointError(reader.path, why=f"has no {box.key}")
        dims = itertools.islice(zip(stored.shape, box.whole, strict=False), 1 if box.padded else 0, None)
        if len(stored.shape) != len(box.whole) or any(there != here for there, here in dims):
            raise CheckpointError(
                reader.path, why=f"has {box.key} in the shape {list(stored.shape)}, and here it is {list(box.whole)}"
            )


def write_metadata(
    folder: Path,
    tensors: Mapping[str, tuple[torch.dtype, Shape]],
    items: Mapping[str, Sequence[Item]],
    extra_state: Sequence[str],
) -> list[str]:
    """Writes the files that make data files a checkpoint, as megatron's dist_checkpointing does. Returns their names.

    items: by data file.
    """
    chunks: dict[str, list[ChunkStorageMetadata]] = {key: [] for key in tensors}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for file, in_file in items.items():
        for item in in_file:
            offset = None if item.offsets is None else torch.Size(item.offsets)
            storage[MetadataIndex(item.key, offset)] = _StorageInfo(file, item.start, item.length)
            if item.offsets is not None:
                chunks[item.key].append(ChunkStorageMetadata(torch.Size(item.offsets), torch.Size(item.sizes)))
    stored: dict[str, Any] = {
        key: TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks[key])
        for key, (dtype, shape) in tensors.items()
    }
    stored |= {key: BytesStorageMetadata() for key in extra_state}
    metadata = Metadata(stored, None, storage, StorageMeta(checkpoint_id=None))
    with (folder / ".metadata").open("wb") as out:
        pickle.dump(metadata, out)
    (folder / "common.pt").write_bytes(saved_bytes({}))
    about = {
        "sharded_backend": "torch_dist", "sharded_backend_version": 1,
        "common_backend": "torch", "common_backend_version": 1,
    }  # fmt: skip
    (folder / "metadata.json").write_text(json.dumps(about), encoding="utf-8")
    return [".metadata", "common.pt", "metadata.json"]
