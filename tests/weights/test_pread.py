"""Parts of a stored tensor are those of the tensor, however they are read."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

from mrl.weights.pread import MIN_BYTES, LazySlice, TruncatedFile, read_region

ROW = MIN_BYTES  # entries: of 2 and 4 bytes, half a row and less are read by itself
COLUMNS = [(0, ROW), (3, 3 + ROW // 2), (ROW // 2, ROW), (ROW // 4, ROW // 4 + ROW // 2), (5, 6), (7, 7)]


@pytest.fixture
def opened(tmp_path):
    """The file of a tensor behind a few bytes of something else."""

    def of(tensor: torch.Tensor) -> int:
        (tmp_path / "file").write_bytes(b"head" + tensor.view(torch.uint8).numpy().tobytes())
        return os.open(tmp_path / "file", os.O_RDONLY)

    return of


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_region_is_that_of_the_tensor(opened, dtype):
    whole = torch.arange(3 * 4 * ROW).view(3, 4, ROW).float().sin().to(dtype)
    file = opened(whole)
    for (i, j), (k, m), (left, right) in itertools.product([(0, 3), (1, 2), (2, 3)], [(0, 4), (1, 3), (3, 4)], COLUMNS):
        part = read_region(file, 4, dtype=dtype, shape=(3, 4, ROW), region=[(i, j), (k, m), (left, right)])
        assert torch.equal(part, whole[i:j, k:m, left:right]), (i, j, k, m, left, right)
    os.close(file)


def test_a_lazy_slice_is_indexed_as_a_tensor_and_a_short_file_is_told(opened):
    whole = torch.arange(4.0 * ROW).view(4, ROW)
    file = opened(whole)
    lazy = LazySlice((4, ROW), lambda region: read_region(file, 4, dtype=whole.dtype, shape=(4, ROW), region=region))
    for key in (2, slice(1, 3), (slice(None), slice(9, 9 + ROW // 2)), (3, slice(1, 5)), ()):
        assert torch.equal(lazy[key], whole[key]), key
    with pytest.raises(TruncatedFile):
        read_region(file, 8, dtype=whole.dtype, shape=(4, ROW), region=[(3, 4), (0, ROW)])
    os.close(file)
