"""Rows that are streamed take memory for two blocks, however many rows there are."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from mrl.data.rows import open_stream
from mrl.data.streamed import Cursor, one_process_exchange


def test_memory_does_not_grow_with_the_stream(tmp_path):
    """10 MB of rows take no more than 3 MB of them do: two blocks of 100 kB, and what is read at a time."""

    def peak(rows: int) -> int:
        path = tmp_path / f"{rows}.jsonl"
        path.write_text("".join(json.dumps({"text": "fox", "unread": f"{i:01000}"}) + "\n" for i in range(rows)))
        stream = open_stream(str(path), split=None, buffer=100, exchange=one_process_exchange)
        order = lambda what, epoch, count: np.arange(count)  # noqa: E731
        at, index = Cursor(), -1
        tracemalloc.start()
        while at.epoch == 0:
            index, at = stream.take(at, order)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert stream[index]["unread"] == f"{rows - 1:01000}"
        return most

    small, large = peak(2500), peak(10000)
    assert large < 1.1 * small + 500_000 and large < 12 << 20


def test_memory_does_not_grow_with_the_row_groups_of_parquet(tmp_path):
    rng = np.random.default_rng(0)
    table = pa.table({"text": [rng.bytes(500).hex() for _ in range(20_000)]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=1000)
    whole = table.nbytes
    del table
    stream = open_stream(str(tmp_path / "rows.parquet"), split=None, buffer=100, exchange=one_process_exchange)
    order = lambda what, epoch, count: np.arange(count)  # noqa: E731
    at, held = Cursor(), []
    before = pa.total_allocated_bytes()
    while at.epoch == 0:
        _, at = stream.take(at, order)
        held.append(pa.total_allocated_bytes() - before)
    assert len(held) == 20_000 and max(held) < 0.2 * whole, (max(held), whole)
