"""Reads parts of a tensor that is contiguous in a file, on demand.

It uses `pread` and no mapping of the file. Pages of a mapping count as this process's memory while it is open, and
several threads read one file at once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mrl.weights.algebra import Shape

Region = Sequence[tuple[int, int]]
"""(first entry, entry after the last) in each dimension."""
MIN_BYTES = 1024
"""The shortest part of a row that is read alone. Shorter ones cost more to read one by one than the rest of the rows
does."""


class TruncatedFile(Exception):
    """Is raised if the file ends before the bytes that were asked for."""


def read_bytes(file: int, at: int, count: int) -> bytearray:
    """Returns `count` bytes from byte `at` of the open file."""
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        got = os.preadv(file, [view[done:]], at + done)
        if not got:
            raise TruncatedFile(f"ends before byte {at + count}")
        done += got
    return data


def read_region(file: int, at: int, *, dtype: torch.dtype, shape: Shape, region: Region) -> Tensor:
    """Returns new memory with `region` of a contiguous tensor of `shape` whose first byte is byte `at` of the file."""
    if not shape:  # a single number
        return torch.frombuffer(read_bytes(file, at, dtype.itemsize), dtype=dtype).view(())
    wanted = tuple(stop - start for start, stop in region)
    if not math.prod(wanted):
        return torch.empty(wanted, dtype=dtype)
    sizes, part = tuple(shape), list(region)
    while len(sizes) > 1 and part[0][1] - part[0][0] == 1:  # one expert of a stack is contiguous: read no more
        at += part[0][0] * math.prod(sizes[1:]) * dtype.itemsize
        sizes, part = sizes[1:], part[1:]
    row, (first, last) = math.prod(sizes[1:]) * dtype.itemsize, part[0]
    if len(sizes) == 2 and MIN_BYTES <= (part[1][1] - part[1][0]) * dtype.itemsize <= row // 2:
        # one rank's columns: to read whole rows would have each of eight ranks read eight times what it keeps
        (left, right), size = part[1], dtype.itemsize
        columns = [read_bytes(file, at + i * row + left * size, (right - left) * size) for i in range(first, last)]
        return torch.frombuffer(bytearray().join(columns), dtype=dtype).view(wanted)
    data = read_bytes(file, at + first * row, (last - first) * row)
    block = torch.frombuffer(data, dtype=dtype).view(last - first, *sizes[1:])
    for dim, (low, high) in enumerate(part[1:], 1):
        block = block.narrow(dim, low, high - low)
    return block.reshape(wanted)


class LazySlice:
    """Is a tensor that is read as far as it is indexed: `[a:b]`, `[:, a:b]`, `[i, a:b, c:d]`, and `[()]` for all of it.

    whole_rows: False if any of its rows cost as much to read as all of them.
    """

    def __init__(self, shape: Shape, read: Callable[[Region], Tensor], *, whole_rows: bool = True) -> None:
        self.shape, self._read, self.whole_rows = tuple(shape), read, whole_rows

    def __getitem__(self, key: Any) -> Tensor:
        keys = key if isinstance(key, tuple) else (key,)
        keys += (slice(None),) * (len(self.shape) - len(keys))
        region, single = [], []
        for dim, (k, size) in enumerate(zip(keys, self.shape, strict=True)):
            if isinstance(k, int):
                region.append((k, k + 1))
                single.append(dim)
            else:
                start, stop, step = k.indices(size)
                assert step == 1, f"a step of {step}"
                region.append((start, max(start, stop)))
        part = self._read(region)
        for dim in reversed(single):
            part = part.squeeze(dim)
        return part
