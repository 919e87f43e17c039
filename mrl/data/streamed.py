"""Rows that are read while training, forwards, from more files than the disk can hold.

The order is a function of a seed, the epoch and the number of rows that were taken. An epoch has all files, in an order
of its own. Its rows are taken in blocks of `buffer` rows, one after the other, each shuffled in itself; with a buffer
of 0 rows come in the order of the files. Every position (`Cursor`) has the start of its block in the file. A resumed
run reads from there: JSON lines from that byte, Parquet from the row group. A compressed file is unpacked from its
start, and the part before the block is dropped.

One process reads, a block ahead, and holds two blocks at most. The others get their rows from it in chunks, by the
function `exchange`.
"""

from __future__ import annotations

import dataclasses
import gzip
import io
import itertools
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar

import numpy as np
import pyarrow
import pyarrow.parquet

from mrl.data.files import JSONL_SUFFIXES, BadRow, arrow_row, parse_line
from mrl.data.remote import RemoteFile, SourceError, is_ending
from mrl.data.splits import NamedFiles, check_splits
from mrl.errors import DataError, UserError

CHUNK = 256  # rows that processes are given at a time, and of a block where nothing is shuffled
BLOCK = 1 << 20  # bytes of lines read at a time
UNPACKED = 1 << 16  # the same, of a compressed file: what is read when damage is met is lost
ROW_BITS = 40  # of an index: the row in its file; the number of the file is above
MAX_INDEX = 2**62
DAMAGE_FIX = "the file is cut off or damaged: write it again"

T = TypeVar("T")
Order = Callable[[str, int, int], np.ndarray]
"""(what is ordered, epoch, how many) -> their order."""
Mark = tuple[int, int, int]
"""Where a block begins: the place of its file in the order of the epoch, the row there, the byte of that row (in a file
of lines)."""
START: Mark = (0, 0, 0)


@dataclasses.dataclass(frozen=True)
class DamagedRow:
    """A bad row, or the rest of a file that is damaged from this row on."""

    why: str


class Exchange(Protocol):
    """How the processes of a run share the rows that one of them reads, and learn of each other's errors.

    All processes make the same calls in the same order, but one that cannot go on calls `agree` in place of its next
    call.
    """

    def __call__(self, fn: Callable[[], T]) -> T:
        """Calls `fn` in the one process that reads, and returns what it returns in every process. A UserError that it
        raises is raised in every process."""

    def leave_out(self, why: str) -> None:
        """Notes that this process leaves out a row, for the next call to compare. why: begins with file and line."""

    def agree(self, error: UserError | None) -> None:
        """Raises an error in every process if one of them has it, or if some have left out a row that others use.

        error: of this process, or None.
        """


class _OneProcessExchange:
    """The exchange of one process."""

    def __call__(self, fn: Callable[[], T]) -> T:
        return fn()

    def leave_out(self, why: str) -> None:
        pass

    def agree(self, error: UserError | None) -> None:
        if error is not None:
            raise error


one_process_exchange = _OneProcessExchange()


class Cursor(NamedTuple):
    """A position: `position` rows of `epoch` were taken, and the block of the next one begins at `mark`."""

    epoch: int = 0
    position: int = 0
    mark: Mark = START


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Rows of one block, in the order in which they are taken."""

    epoch: int
    first: int  # the position of the first of them
    mark: Mark  # of their block
    rows: Sequence[tuple[int, Any]]  # index, and the line or the row itself
    after: Cursor  # the position after the last

    def has(self, at: Cursor) -> bool:
        return at.epoch == self.epoch and 0 <= at.position - self.first < len(self.rows)


class StreamedRows:
    """The rows of files elsewhere, taken one after the other. `rows[index]` is of those that were taken last.

    find: returns the files, and what the config named them by, once. buffer: rows shuffled together. what: names the
    source in errors. Raises DataError where there are no files or no rows.
    """

    def __init__(
        self, find: Callable[[], tuple[Sequence[RemoteFile], NamedFiles]], *, buffer: int, key: str, what: str,
        exchange: Exchange = one_process_exchange,
    ) -> None:  # fmt: skip
        self.buffer, self.key, self.what, self._exchange = buffer, key, what, exchange
        self.epochs: float | None = None  # after which nothing is read ahead
        files: list[RemoteFile] = []

        def found() -> tuple[list[tuple[str, int | None, str]], NamedFiles]:
            of_path, named = find()
            check_splits([named])
            files.extend(of_path)
            return [(file.name, file.size, file.tag) for file in files], named

        self._files, self.named = exchange(found)  # names, sizes and tags
        self._reader = _Reader(files, self)
        self._chunk: Chunk | None = None
        self._taken: Mapping[int, Any] = {}
        self._head: dict[int, Any] | None = None  # the first rows, until others are taken: several parts look at them

    def take(self, at: Cursor, order: Order) -> tuple[int, Cursor]:
        """Returns the index of the row at a position, and the next position. order: see `Order`."""
        chunk = self._chunk
        if chunk is None or not chunk.has(at):
            chunk = self._chunk = self._exchange(lambda: self._reader.chunk(at, order))
            self._taken, self._head = dict(chunk.rows), None
        number = at.position - chunk.first
        after = chunk.after if number + 1 == len(chunk.rows) else at._replace(position=at.position + 1)
        return chunk.rows[number][0], after

    def head(self) -> Iterator[int]:
        """Yields the indices of the first rows of the first file that has any."""
        if self._head is None:
            self._head = dict(self._exchange(self._first_rows))
        if not self._head:
            raise self.empty()
        self._chunk, self._taken = None, self._head
        yield from self._head

    def _first_rows(self) -> list[tuple[int, Any]]:
        return [(index, row) for _, index, row in itertools.islice(self._reader.rows(), CHUNK)]

    def empty(self) -> DataError:
        return DataError(self.key, why=f"{self.what}: has no rows", fix="at least one row is needed")

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._taken[index]
        if isinstance(row, DamagedRow):
            raise BadRow(row.why)
        return parse_line(row) if isinstance(row, bytes) else dict(row)

    def where(self, index: int) -> str:
        """Returns `file:line` of a row, or `file:row N` (from 0) where a file has no lines."""
        name, row = self._files[index >> ROW_BITS][0], index % (1 << ROW_BITS)
        return f"{name}:{row + 1}" if name.endswith(JSONL_SUFFIXES) else f"{name}:row {row}"

    def folder(self, index: int) -> str:
        """Returns the folder of relative paths in a row; for a URL, a folder that does not exist."""
        return os.path.dirname(os.path.abspath(self._files[index >> ROW_BITS][0]))

    def fingerprint(self) -> list[dict[str, Any]]:
        """Returns {"name", "rows", "size", "hash"} of each file; rows are not known."""
        return [{"name": name, "rows": None, "size": size, "hash": tag} for name, size, tag in self._files]

    def close(self) -> None:
        """Ends reading ahead."""
        self._reader.stop()


# ------------------------------------------------------------------------------------------------------------- reading


@dataclasses.dataclass(frozen=True)
class _Block(Chunk):
    """All rows of a block, which are shuffled together."""

    order: Order

    def has_in_order(self, at: Cursor, order: Order) -> bool:
        return order == self.order and self.has(at)


class _Reader:
    """Reads blocks, one ahead; of the one process that reads."""

    def __init__(self, files: Sequence[RemoteFile], of: StreamedRows) -> None:
        self._files, self._of = files, of
        self._size = of.buffer or CHUNK
        self._block: _Block | None = None
        self._ahead: Future[_Block] | None = None
        self._going_on: tuple[Cursor, Iterator[tuple[Mark, int, Any]]] | None = None
        self._stopped = threading.Event()

    def chunk(self, at: Cursor, order: Order) -> Chunk:
        """Returns rows from a position on."""
        block = self._block_of(at, order)
        i = at.position - block.first
        rows = block.rows[i : i + CHUNK]
        is_last = i + len(rows) == len(block.rows)
        after = block.after if is_last else Cursor(at.epoch, at.position + len(rows), block.mark)
        return Chunk(at.epoch, at.position, block.mark, rows, after)

    def stop(self) -> None:
        self._stopped.set()

    def _block_of(self, at: Cursor, order: Order) -> _Block:
        if self._block is not None and self._block.has_in_order(at, order):
            return self._block
        ahead, self._ahead = self._ahead, None
        block = None if ahead is None else ahead.result()
        if block is None or not block.has_in_order(at, order):
            start = at._replace(position=at.position // self._size * self._size)
            block = self._read(start, order)
            assert block.has_in_order(at, order), f"position {at} is not in a block of {len(block.rows)} rows"
        self._block = block
        if self._of.epochs is None or block.after.epoch < self._of.epochs:
            self._ahead = _in_thread(lambda: self._read(block.after, order))
        return block

    def _read(self, start: Cursor, order: Order) -> _Block:
        """Returns the block that begins at `start`, a multiple of the size of blocks."""
        own = self._of
        if self._going_on is None or self._going_on[0] != start:
            files = order("files", start.epoch, len(self._files)) if own.buffer else np.arange(len(self._files))
            self._going_on = start, self.rows([int(i) for i in files], start.mark)
        rows, iterator = [], self._going_on[1]
        self._going_on = None  # of a file that breaks, there is no going on
        for _, index, row in itertools.islice(iterator, self._size):
            if self._stopped.is_set() or is_ending():
                raise SourceError(own.key, why=f"{own.what}: reading was ended")
            rows.append((index, row))
        if not rows:
            raise own.empty()
        following = next(iterator, None)
        if following is None and start.position == 0 and all(isinstance(row, DamagedRow) for _, row in rows):
            raise DataError(own.key, why=f"{own.what}: {self._of.where(rows[0][0])} {rows[0][1].why}")
        if following is None:
            after = Cursor(start.epoch + 1)
        else:
            after = Cursor(start.epoch, start.position + len(rows), following[0])
            self._going_on = after, itertools.chain([following], iterator)
        if own.buffer:
            shuffled = order(f"block {start.position // self._size}", start.epoch, len(rows))
            rows = [rows[i] for i in shuffled]
        return _Block(start.epoch, start.position, start.mark, rows, after, order)

    def rows(self, files: Sequence[int] | None = None, mark: Mark = START) -> Iterator[tuple[Mark, int, Any]]:
        """Yields from a mark on: the mark of a row, its index, and the line or the row itself. files: their order."""
        places = list(range(len(self._files))) if files is None else files
        first, row, offset = mark
        for place, number in enumerate(places[first:], start=first):
            file = self._files[number]
            read = _read_lines if file.name.endswith(JSONL_SUFFIXES) else _read_table
            for at, byte, found in read(file, self._of.key, self._stopped, row, offset):
                yield (place, at, byte), number << ROW_BITS | at, found
            row = offset = 0


def _in_thread(fn: Callable[[], T]) -> Future[T]:
    """Calls `fn` in a thread. It is no daemon: Python aborts a process that ends while one of those reads a file."""
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(fn())
        except BaseException as error:  # whoever asks for the result gets it
            future.set_exception(error)

    threading.Thread(target=call, name="mrl-stream").start()
    return future


class _DamagedError(Exception):
    """A file is damaged: what is wrong with it."""


def _read_lines(
    file: RemoteFile, key: str, ended: threading.Event, row: int, offset: int
) -> Iterator[tuple[int, int, bytes | DamagedRow]]:
    """Yields line number, byte and content of the lines of a file that are not blank. row, offset: of the first."""
    with file.open(key, ended) as raw, _unpacked(file, raw) as content:
        parts: list[bytes] = []  # of a line whose end was not read yet
        try:
            for block in _blocks(content, offset, file, key):
                first, *lines = block.split(b"\n") if block else [b"", b""]
                parts.append(first)
                if not lines:
                    continue
                for line in [b"".join(parts), *lines[:-1]]:
                    if line.strip():
                        yield row, offset, line
                    row, offset = row + 1, offset + len(line) + 1
                parts = [lines[-1]]
        except _DamagedError as error:
            yield row, offset, DamagedRow(str(error))


def _unpacked(file: RemoteFile, raw: io.BufferedReader) -> Any:
    if file.name.endswith(".gz"):
        return gzip.GzipFile(fileobj=raw)
    if file.name.endswith(".zst"):
        return pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), "zstd")
    return raw


def _blocks(content: Any, offset: int, file: RemoteFile, key: str) -> Iterator[bytes]:
    """Yields the bytes of a file from an offset on, and none at its end.

    A compressed file is always read from the start, in the same steps, so that damage shows at the same row.
    """
    is_plain = isinstance(content, io.BufferedReader)
    if is_plain and content.seekable():
        content.seek(offset)
        offset = 0
    while True:
        try:
            block = content.read(BLOCK) if is_plain else content.read1(UNPACKED)
        except (OSError, EOFError, zlib.error, pyarrow.ArrowException) as e:
            raise _DamagedError(f"cannot be decompressed from here on ({e}); {DAMAGE_FIX}") from e
        if offset:
            if not block:
                fix = "start a new run in another output_dir"
                raise DataError(key, why=f"{file.name} is shorter than it was", fix=fix)
            skipped = min(offset, len(block))
            block, offset = block[skipped:], offset - skipped
            if not block:
                continue
        yield block
        if not block:
            return


def _read_table(
    file: RemoteFile, key: str, ended: threading.Event, row: int, offset: int
) -> Iterator[tuple[int, int, dict[str, Any] | DamagedRow]]:
    """Yields row number, 0 and content of the rows of a Parquet file. row: the first."""
    with file.open(key, ended) as raw:
        try:
            for start, batch in _parquet_batches(raw, row):
                for i, found in enumerate(batch.slice(max(0, row - start)).to_pylist(), start=max(row, start)):
                    try:
                        content: dict[str, Any] | DamagedRow = arrow_row(found, batch.schema)
                    except BadRow as e:
                        content = DamagedRow(str(e))
                    yield i, 0, content
                    row = i + 1
        except (OSError, ValueError, OverflowError, pyarrow.ArrowException) as e:  # ValueError: text that is no UTF-8
            yield row, 0, DamagedRow(f"cannot be read as Parquet from here on ({e}); {DAMAGE_FIX}")


def _parquet_batches(raw: BinaryIO, row: int) -> Iterator[tuple[int, pyarrow.RecordBatch]]:
    """Yields batches from the row group on that has `row`, each with the number of its first row.

    A reader of several row groups keeps what it has read of all of them (pyarrow 26): each gets one of its own.
    """
    parquet = pyarrow.parquet.ParquetFile(raw)
    start = 0
    for group in range(parquet.num_row_groups):
        rows = parquet.metadata.row_group(group).num_rows
        if start + rows > row:
            at = start
            for batch in parquet.iter_batches(CHUNK, row_groups=[group]):
                yield at, batch
                at += batch.num_rows
        start += rows
