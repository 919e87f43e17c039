"""Writes the three files that make data files (data_files.py) an mcore distributed checkpoint, `.metadata` the first.

The files are those that megatron's dist_checkpointing writes and reads.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
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

from mrl.engine.torch_dist.data_files import Item, saved_bytes
from mrl.weights.algebra import Shape


def write_metadata(
    folder: Path,
    tensors: Mapping[str, tuple[torch.dtype, Shape]],
    items: Mapping[str, Sequence[Item]],
    extra_state: Sequence[str],
) -> list[str]:
    """Writes the files that make data files a checkpoint. Returns their names. items: by data file."""
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
