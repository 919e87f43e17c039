"""Checksums of files, and of the data files that are written in parts."""

from __future__ import annotations

import io
import zipfile
import zlib

import pytest
import torch

from mrl.engine.torch_dist.data_files import WRITE_BACK_BYTES, ItemFile
from mrl.weights.checksums import crc32_of


def test_a_file_is_summed(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 5_000_000)
    assert crc32_of(tmp_path / "file") == zlib.crc32(b"x" * 5_000_000)


@pytest.mark.parametrize("rows", [0, 1, 40])
def test_a_data_file_knows_its_sum_and_holds_what_torch_saves(tmp_path, rows):
    """Three items, the last of more bytes than are given to the disk at once."""
    file = ItemFile(tmp_path / "file")
    tensors = [torch.randn(rows, 33), torch.randn(7).bfloat16(), torch.randn(WRITE_BACK_BYTES // 2000, 1001)]
    items = [
        file.tensor(f"t{i}", (0,) * t.dim(), tuple(t.shape), t.dtype, t.split(max(len(t) // 3, 1)))
        for i, t in enumerate(tensors)
    ]
    items.append(file.add_empty("none"))
    file.close()
    data = (tmp_path / "file").read_bytes()
    assert (file.size, file.crc32) == (len(data), zlib.crc32(data))
    for item, tensor in zip(items, tensors, strict=False):
        archive = io.BytesIO(data[item.start : item.start + item.length])
        assert zipfile.ZipFile(archive).testzip() is None
        archive.seek(0)
        assert torch.equal(torch.load(archive, weights_only=True), tensor)
    assert sum(item.length for item in items) == len(data)
