"""Orders of rows as pure functions of a seed, the same on every machine."""

from __future__ import annotations

import hashlib

import numpy as np


def row_order(seed: int, epoch: int, rows: int, shuffle: bool = True) -> np.ndarray:
    """Returns [rows] int64: the order of an epoch.

    A stable sort of Philox's raw output: NumPy keeps bit generators the same between versions, but not permutation().
    """
    if not shuffle:
        return np.arange(rows)
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(rows), kind="stable")


def seed_of(seed: int, name: str) -> int:
    """Returns the seed of the order of a source: other than that of its neighbours, wherever it stands in the list."""
    return (seed + int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")) % 2**64
