"""Write an mcore distributed checkpoint (`torch_dist`) tensor by tensor, on one process, in bounded memory.

The files are those that megatron's dist_checkpointing writes and reads: `.metadata`, `metadata.json`, `common.pt`, and data
files whose items are what `torch.save` writes. An item's bytes are streamed into its archive block by block.
"""

from __future__ import annotations

import collections
import dataclasses
import io
import json
import os
import pickle
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
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

from mrl.converters.algebra import Shape

STORAGES = {
    torch.float64: torch.DoubleStorage, torch.float32: torch.FloatStorage, torch.bfloat16: torch.BFloat16Storage,
    torch.float16: torch.HalfStorage, torch.int64: torch.LongStorage, torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage, torch.int8: torch.CharStorage, torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Item:
    """What a data file holds: a part of the tensor `key` that begins at `offsets`, or an object where offsets is None."""

    key: str
    offsets: Shape | None
    sizes: Shape | None
    start: int
    length: int


class ItemFile:
    """A data file, written from front to back. crc32, size: of what was written so far."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("wb")
        self.size = self.crc32 = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.crc32 = zlib.crc32(view, self.crc32)
        self.size += len(view)
        self._stream.write(view)
        return len(view)

    def flush(self) -> None:
        """Part of being a file: `close` does it."""

    def tensor(self, key: str, offsets: Shape, sizes: Shape, dtype: torch.dtype, blocks: Iterable[Tensor]) -> Item:
        """Appends a part of a tensor. blocks: its rows in order, in `dtype`."""
        start, count = self.size, 0
        with zipfile.ZipFile(self, "w", zipfile.ZIP_STORED) as archive:
            # a ZipInfo has a fixed date: the same tensor gives the same bytes
            archive.writestr(zipfile.ZipInfo("archive/data.pkl"), _tensor_pickle(dtype, sizes))
            archive.writestr(zipfile.ZipInfo("archive/byteorder"), "little")
            with archive.open(zipfile.ZipInfo("archive/data/0"), "w", force_zip64=True) as entry:
                for block in blocks:
                    count += entry.write(as_bytes(block))
            archive.writestr(zipfile.ZipInfo("archive/version"), "3\n")
        expected = torch.Size(sizes).numel() * dtype.itemsize
        assert count == expected, f"{key}: {count} bytes for shape {sizes} of {dtype}"
        return Item(key, tuple(offsets), tuple(sizes), start, self.size - start)

    def nothing(self, key: str) -> Item:
        """Appends what megatron stores of a module that has no extra state."""
        start, data = self.size, io.BytesIO()
        torch.save([None], data)
        self.write(data.getbuffer())
        return Item(key, None, None, start, self.size - start)

    def close(self) -> None:
        """Puts the file on disk."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()

    def abort(self) -> None:
        """Closes a file that is of no use."""
        self._stream.close()


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, without a copy where it is contiguous."""
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


class _Storage:
    pass


class _Rebuilt:
    def __init__(self, storage: _Storage, shape: Shape) -> None:
        self.storage, self.shape = storage, shape

    def __reduce__(self) -> tuple:
        strides = torch.empty(self.shape, device="meta").stride()
        state = (self.storage, 0, tuple(self.shape), strides, False, collections.OrderedDict())
        return torch._utils._rebuild_tensor_v2, state


def _tensor_pickle(dtype: torch.dtype, shape: Shape) -> bytes:
    """`data.pkl` of a saved tensor: how it is made of the storage `data/0`."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, item: Any) -> Any:
            if isinstance(item, _Storage):
                return "storage", STORAGES[dtype], "0", "cpu", torch.Size(shape).numel()
            return None

    out = io.BytesIO()
    Pickler(out, protocol=2).dump(_Rebuilt(_Storage(), shape))
    return out.getvalue()


def extra_state_keys(tensors: Mapping[str, Shape]) -> list[str]:
    """The objects that megatron's linear modules have beside their weights; they hold nothing, and loading asks for them.

    The down-projections of latent attention are modules of ours (mrl/mcore_models/latent.py), and have none.
    """
    keys = []
    for key, shape in tensors.items():
        module, _, kind = key.rpartition(".")
        name = module.rpartition(".")[2]
        linear = name.startswith("linear_") and not name.endswith("_down_proj")
        if kind == "weight" and (linear or name == "eh_proj"):
            experts = shape[0] if ".experts.experts." in key else 1
            keys += [f"{module}._extra_state/shard_{e}_{experts}" for e in range(experts)]
    return keys


def write_metadata(
    folder: Path,
    tensors: Mapping[str, tuple[torch.dtype, Shape]],
    items: Mapping[str, Sequence[Item]],
    extra_state: Sequence[str],
) -> list[str]:
    """Writes what makes data files a checkpoint; returns the names of the files. items: by data file."""
    chunks: dict[str, list[ChunkStorageMetadata]] = {key: [] for key in tensors}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for file, held in items.items():
        for item in held:
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
    torch.save({}, folder / "common.pt")
    facts = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}  # fmt: skip
    (folder / "metadata.json").write_text(json.dumps(facts), encoding="utf-8")
    return [".metadata", "common.pt", "metadata.json"]
