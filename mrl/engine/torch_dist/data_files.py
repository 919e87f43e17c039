"""The data files of a distributed checkpoint (`torch_dist`), written front to back, by one process, in bounded memory.

A file's items are what `torch.save` writes. An item's bytes are streamed into its archive block by block.
"""

from __future__ import annotations

import collections
import dataclasses
import io
import os
import pickle
import sys
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl.weights.algebra import Shape
from mrl.weights.checksums import crc32

STORAGES = {
    torch.float64: torch.DoubleStorage, torch.float32: torch.FloatStorage, torch.bfloat16: torch.BFloat16Storage,
    torch.float16: torch.HalfStorage, torch.int64: torch.LongStorage, torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage, torch.int8: torch.CharStorage, torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Item:
    """An entry of a data file: a part of the tensor `key`, beginning at `offsets`, or an object if offsets is None."""

    key: str
    offsets: Shape | None
    sizes: Shape | None
    start: int
    length: int


WRITE_BACK_BYTES, PAGE_BYTES = 2**23, 2**12
WRITE_BYTES = 2**17
"""Bytes of one write. Linux gives a larger one larger pages, which a virtual machine may first have to ask its host
for: 4 GB in writes of 1 MB took 10.8 s, of 128 KB 1.9 s (Linux 6.18 in Firecracker)."""


class ItemFile:
    """Writes a data file from front to back. crc32, size: of the bytes so far.

    It has the disk start every few megabytes. Else the disk is idle until `close`, which waits for all of it.
    """

    def __init__(self, path: Path) -> None:
        self._stream = path.open("wb")
        self.size = self.crc32 = 0
        self._given = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.crc32 = crc32(view, self.crc32)
        self.size += len(view)
        for start in range(0, len(view), WRITE_BYTES):
            self._stream.write(view[start : start + WRITE_BYTES])
        if self.size - self._given >= WRITE_BACK_BYTES:
            self._stream.flush()
            self._given = start_writeback(self._stream.fileno(), self._given, self.size - self.size % PAGE_BYTES)
        return len(view)

    def flush(self) -> None:
        """Does nothing, as a file may: `close` flushes."""

    def tensor(self, key: str, offsets: Shape, sizes: Shape, dtype: torch.dtype, blocks: Iterable[Tensor]) -> Item:
        """Appends a part of a tensor. blocks: its rows in order, in `dtype`."""
        start, count = self.size, 0
        with zipfile.ZipFile(self, "w", zipfile.ZIP_STORED) as archive:
            # a ZipInfo has a fixed date: the same tensor gives the same bytes
            archive.writestr(zipfile.ZipInfo("archive/data.pkl"), _tensor_pickle(dtype, sizes))
            archive.writestr(zipfile.ZipInfo("archive/byteorder"), "little")
            with archive.open(zipfile.ZipInfo("archive/data/0"), "w", force_zip64=True) as opened:
                entry: Any = opened  # of which private fields are set
                for block in blocks:
                    data = as_bytes(block)
                    # as entry.write does it with zlib, whose 2.3 GB/s (zlib-ng: 29) would be most of an import's time
                    entry._crc = crc32(data, entry._crc)
                    count += entry._fileobj.write(data)
                entry._file_size = count
            archive.writestr(zipfile.ZipInfo("archive/version"), "3\n")
        expected = torch.Size(sizes).numel() * dtype.itemsize
        assert count == expected, f"{key}: {count} bytes for shape {sizes} of {dtype}"
        return Item(key, tuple(offsets), tuple(sizes), start, self.size - start)

    def add_empty(self, key: str) -> Item:
        """Appends what megatron stores of a module that has no extra state."""
        start = self.size
        self.write(saved_bytes([None]))
        return Item(key, None, None, start, self.size - start)

    def close(self) -> None:
        """Puts the file on disk."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()

    def abort(self) -> None:
        """Closes a file that is of no use."""
        self._stream.close()


def saved_bytes(value: Any) -> bytes:
    """Returns what `torch.save` writes of a value, for files: its own writer has no OSError for a full disk.

    Not as `getbuffer`: Python 3.12.1 crashes when it collects one after a write that failed.
    """
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


def start_writeback(file: int, start: int, end: int) -> int:
    """Has the system begin to write these bytes of an open file, without waiting for it. Returns `end`."""
    if sys.platform == "linux":
        os.posix_fadvise(file, start, end - start, os.POSIX_FADV_DONTNEED)  # begins with pages that are not on disk yet
    return end


def as_bytes(tensor: Tensor) -> memoryview:
    """Returns the bytes of a tensor, without a copy where it is contiguous."""
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


class _Storage:
    pass


class _Rebuilt:
    def __init__(self, storage: _Storage, shape: Shape) -> None:
        self.storage, self.shape = storage, shape

    def __reduce__(self) -> tuple:
        strides = torch.empty(self.shape, device="meta").stride()
        state: tuple[Any, ...] = (self.storage, 0, tuple(self.shape), strides, False, collections.OrderedDict())
        return torch._utils._rebuild_tensor_v2, state


def _tensor_pickle(dtype: torch.dtype, shape: Shape) -> bytes:
    """Returns `data.pkl` of a saved tensor: how to rebuild it from the storage `data/0`."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, item: Any) -> Any:
            if isinstance(item, _Storage):
                return "storage", STORAGES[dtype], "0", "cpu", torch.Size(shape).numel()
            return None

    out = io.BytesIO()
    Pickler(out, protocol=2).dump(_Rebuilt(_Storage(), shape))
    return out.getvalue()


def extra_state_keys(tensors: Mapping[str, Shape]) -> list[str]:
    """Returns the objects that megatron's linear modules have beside their weights: empty, and loading asks for them.

    The down-projections of latent attention are modules of ours (mrl/mcore_models/latent.py), and have none.
    """
    keys = []
    for key, shape in tensors.items():
        module, _, kind = key.rpartition(".")
        name = module.rpartition(".")[2]
        linear = name.startswith("linear_") and not name.endswith("_down_proj")
        if kind == "weight" and (linear or name in ("eh_proj", "in_proj", "out_proj")):
            experts = shape[0] if ".experts.experts." in key else 1
            keys += [f"{module}._extra_state/shard_{e}_{experts}" for e in range(experts)]
    return keys
