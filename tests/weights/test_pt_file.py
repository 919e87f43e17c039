"""A `.pt` outside checkpoints is what was written or is refused: each bit, each length, an older file, a full disk.

Checksums of files, and of the data files that are written in parts.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pickle
import random
import zipfile
import zlib

import pytest
import torch

from mrl.engine.torch_dist.data_files import WRITE_BACK_BYTES, ItemFile
from mrl.errors import CheckpointError
from mrl.weights import pt_file
from mrl.weights.checksums import crc32_of
from mrl.weights.pt_file import load_pt, read_pt, write_pt

CONTENT = {"made_by": "{}", "names": torch.arange(48, dtype=torch.uint8), "log_probs": torch.randn(300), "n": [1, None]}


@pytest.fixture
def file(tmp_path):
    write_pt(tmp_path / "cache" / "a.pt", CONTENT)
    return tmp_path / "cache" / "a.pt"


def same(found):
    return found.keys() == CONTENT.keys() and all(
        torch.equal(found[name], of) if isinstance(of, torch.Tensor) else found[name] == of
        for name, of in CONTENT.items()
    )


@pytest.mark.parametrize("mmap", [True, False])
def test_what_was_written_is_read_by_this_mrl_and_by_torch(file, mmap):
    assert same(read_pt(file, fields=("made_by",), mmap=mmap))
    assert same(torch.load(file, weights_only=True, mmap=mmap))  # so does an older mrl
    assert zipfile.ZipFile(file).testzip() is None and [p.name for p in file.parent.iterdir()] == ["a.pt"]


def test_no_bit_changes_unseen(file):
    """Bits all over the file: it is refused, or has what was written. There is padding between records."""
    whole = file.read_bytes()
    rng = random.Random(0)
    places = [(rng.randrange(len(whole)), rng.randrange(8)) for _ in range(200)]
    refused = 0
    for at, bit in places:
        content = bytearray(whole)
        content[at] ^= 1 << bit
        file.write_bytes(content)
        try:
            assert same(read_pt(file)), (at, bit)
        except CheckpointError as error:
            assert "a.pt: cannot be read (" in str(error)
            refused += 1
    assert refused > 50


def test_no_length_passes(file):
    """Cut anywhere."""
    whole = file.read_bytes()
    for length in [*range(0, len(whole), 97), *range(len(whole) - 40, len(whole))]:
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_pt(file)


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


KINDS = {
    "a pickle": lambda p: p.write_bytes(pickle.dumps(Evil(p.with_name("ran")), 2)),
    "torch's": lambda p: torch.save({"made_by": Evil(p.with_name("ran"))}, p),
    "ours": lambda p: write_pt(p, {"made_by": Evil(p.with_name("ran"))}),
    "empty": lambda p: p.write_bytes(b""),
    "text": lambda p: p.write_text("hello"),
    "nothing": lambda p: None,
    "another dict": lambda p: write_pt(p, {"step": 1}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("read", [read_pt, load_pt])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_such_file_is_refused_in_words_of_ours(tmp_path, kind, read):
    path = tmp_path / "a.pt"
    with contextlib.suppress(OSError):
        KINDS[kind](path)
    with pytest.raises(CheckpointError) as error:
        read(path, fields=("made_by",))
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    assert "weights_only" not in str(error.value) and "pytorch.org" not in str(error.value)
    assert not (tmp_path / "ran").exists()


def test_a_full_disk_leaves_the_file_before(file, monkeypatch):
    """Wherever the write that fails is: OSError, which says why, and nothing half written."""
    before, size = file.read_bytes(), len(file.read_bytes())

    class Full(pt_file._Stream):
        def __init__(self, out):
            super().__init__(Out(out))

    class Out:
        room = 0

        def __init__(self, out):
            self.out, self.left = out, Out.room

        def write(self, data):
            self.left -= len(data)
            if self.left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.out.write(data)

        def __getattr__(self, name):
            return getattr(self.out, name)

    monkeypatch.setattr(pt_file, "_Stream", Full)
    for Out.room in (0, 1, 100, size // 2, size - 1):
        with pytest.raises(OSError, match="No space left"):
            write_pt(file, CONTENT)
        assert file.read_bytes() == before and [p.name for p in file.parent.iterdir()] == ["a.pt"]


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
