"""One data file as rows by index: JSON lines through a byte-offset index, Parquet through a memory-mapped Arrow copy.

No row is held in memory: a JSON-lines file of a million rows costs 16 MB (an offset and a line per row) and one pass
at the start. Compressed files and Parquet, which have no random access to a row, are converted once into
`<the cache of datasets>/mrl` (moved with HF_DATASETS_CACHE). The copy's name is made from the source's path, size and
modification time, so a changed source gets a new copy. A source that changes under an open index is an error.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import logging
import os
import secrets
import shutil
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
from filelock import FileLock

from mrl.errors import NO_LOCKS, DataError

logger = logging.getLogger(__name__)

JSONL_SUFFIXES = tuple(kind + packed for kind in (".jsonl", ".json") for packed in ("", ".gz", ".zst"))
SUFFIXES = (*JSONL_SUFFIXES, ".parquet")
BLOCK = 8 << 20  # bytes decompressed at a time
ENDS = 1 << 20  # bytes hashed at each end of a file that is not read whole
ARROW_ROWS = 1024  # rows in a record batch of an Arrow copy


class BadRow(DataError):
    """A row that cannot be used: "what is wrong; what would work".

    Whoever knows the file and line puts them in front.
    """


def row_error(where: str, bad: BadRow) -> DataError:
    """Returns the error of a bad row; `data.on_bad_row: skip` would leave it out. where: its file and line."""
    error = DataError(where, why=str(bad))
    error.may_be_skipped = True
    return error


def open_file(path: str) -> JsonlFile | ParquetFile:
    """Returns the rows of one file, by its suffix. Raises DataError."""
    try:
        return JsonlFile(path) if path.endswith(JSONL_SUFFIXES) else ParquetFile(path)
    except OSError as e:
        raise DataError(path, why=f"cannot be read ({e})", fix="check the file and its permissions") from e


# ---------------------------------------------------------------------------------------------- the cache of copies


def cached_copy(path: str, suffix: str, write: Callable[[str, str], None]) -> str:
    """Returns a converted copy of `path`, made by `write(path, target)` unless one for this path, size and time exists.

    Processes wait for the first one to ask; the copy appears under its name only when it is whole.
    """
    stat = os.stat(path)
    key = hashlib.sha256(f"{os.path.realpath(path)}|{stat.st_size}|{stat.st_mtime_ns}|1".encode()).hexdigest()[:20]
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "mrl"
    target = folder / f"{Path(path).name[:80]}-{key}{suffix}"
    if target.exists():
        return str(target)
    # of its own where there are no locks: containers on a shared disk have the same process ids
    unfinished = Path(f"{target}.{secrets.token_hex(8)}.tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock_where_there_are_locks(f"{target}.lock"):
            if not target.exists():
                try:
                    write(path, str(unfinished))
                    now = os.stat(path)
                    if (now.st_size, now.st_mtime_ns) != (stat.st_size, stat.st_mtime_ns):
                        why = "the file changed while it was converted"
                        raise DataError(path, why=why, fix="start again when it is written")
                    unfinished.replace(target)
                finally:
                    unfinished.unlink(missing_ok=True)
    except (OSError, EOFError, zlib.error, pyarrow.ArrowException) as e:
        raise DataError(
            path,
            why=f"cannot be converted into {folder} ({e})",
            fix="if the file is damaged or cut off, write it again; else set HF_DATASETS_CACHE to another folder",
        ) from e
    return str(target)


@contextlib.contextmanager
def _lock_where_there_are_locks(path: str) -> Iterator[None]:
    """Holds a lock. Without locks in the file system, processes that come at once each write a copy."""
    lock = FileLock(path, fallback_to_soft=False)
    try:
        lock.acquire()
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        logger.warning("no lock in %s (%s): each process may convert the data for itself", Path(path).parent, error)
    try:
        yield
    finally:
        lock.release()


def _decompress(path: str, target: str) -> None:
    zstd = path.endswith(".zst")
    packed: Any = pyarrow.input_stream(path, compression="zstd") if zstd else gzip.open(path)  # noqa: SIM115
    with packed as stream, open(target, "wb") as out:
        shutil.copyfileobj(stream, out, BLOCK)


def _parquet_to_arrow(path: str, target: str) -> None:
    parquet = pyarrow.parquet.ParquetFile(path)
    # An Arrow file holds one dictionary per column; a Parquet file may have one per row group.
    fields = [
        pyarrow.field(f.name, f.type.value_type if pyarrow.types.is_dictionary(f.type) else f.type)
        for f in parquet.schema_arrow
    ]
    schema = pyarrow.schema(fields)
    with pyarrow.OSFile(target, "wb") as out, pyarrow.ipc.new_file(out, schema) as writer:
        for batch in parquet.iter_batches(batch_size=ARROW_ROWS):
            writer.write_batch(batch.cast(schema))


# -------------------------------------------------------------------------------------------------------- JSON lines


class JsonlFile:
    """A JSON-lines file, plain or compressed (.gz, .zst). Blank lines are no rows, but count as lines."""

    def __init__(self, path: str) -> None:
        self.name = path
        packed = path.endswith((".gz", ".zst"))
        self._path = cached_copy(path, ".jsonl", _decompress) if packed else path
        self._file: BinaryIO | None = None
        with open(self._path, "rb") as file:
            self._stat = _identity(file)
            self._starts, self._lines, self._crc = _index_lines(file)

    def __len__(self) -> int:
        return len(self._lines)

    def where(self, index: int) -> str:
        """Returns `file:line` (from 1) of a row."""
        return f"{self.name}:{self._lines[index] + 1}"

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns the row as a fresh dict. Raises BadRow."""
        if self._file is None:
            self._file = open(self._path, "rb")  # noqa: SIM115  kept open between reads; see close()
        if _identity(self._file) != self._stat:
            raise DataError("the file changed while it was in use; start again with the new file")
        start, end = self._starts[index], self._starts[index + 1]
        # `end` is where the next row starts, so blank lines between the two come along; JSON ignores them.
        return parse_line(os.pread(self._file.fileno(), end - start, start))

    def fingerprint(self) -> dict[str, Any]:
        """Returns the identity of the content, without modification times."""
        return {"name": self.name, "rows": len(self), "size": self._stat[0], "hash": f"crc32:{self._crc:08x}"}

    def close(self) -> None:
        """Gives back the file handle; the next read opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def parse_line(line: bytes) -> dict[str, Any]:
    """Returns the row of a line. Raises BadRow."""
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as e:
        if line.startswith(b"[") or line.strip() == b"{":
            why = "the file is JSON that is spread over several lines; write one object per line: "
            raise BadRow(f"{why}jq -c '.[]' of an array, jq -c . of objects") from None
        raise BadRow(f"is not a JSON object ({e}); each line must be one object in UTF-8") from None
    if not isinstance(row, dict):
        raise BadRow(f"is no JSON object but {kind_of(row)}; each line must be one object, not a part of an array")
    return row


def _identity(file: BinaryIO) -> tuple[int, int]:
    stat = os.fstat(file.fileno())
    return stat.st_size, stat.st_mtime_ns


def _index_lines(file: BinaryIO) -> tuple[array[int], array[int], int]:
    """Returns the starts of rows and the end of the file, the line of each row (from 0), and the CRC-32 of all."""
    starts, lines, crc, position = array("q"), array("q"), 0, 0
    for number, line in enumerate(file):
        crc = zlib.crc32(line, crc)
        if not line.isspace():
            starts.append(position)
            lines.append(number)
        position += len(line)
    starts.append(position)
    return starts, lines, crc


# ------------------------------------------------------------------------------------------------------------ Arrow


def arrow_row(row: dict[str, Any], schema: Iterable[pyarrow.Field]) -> dict[str, Any]:
    """Returns a row of an Arrow table as a line of JSON would have it. Raises BadRow.

    Null fields are left out at every depth. Arrow gives every struct of a column the fields of all of them: a message
    would have `tool_calls: None` because another row has tool calls. Text of Arrow's type for JSON (`Json` of
    `datasets`) is parsed. Its own nulls stay, as those of a line do.
    """
    return {f.name: _arrow_value(row[f.name], f.type) for f in schema if row[f.name] is not None}


def _arrow_value(value: Any, type: pyarrow.DataType) -> Any:
    if value is None:
        return None
    if isinstance(type, pyarrow.JsonType):
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as e:
            raise BadRow(f"a value of type JSON is {value!r:.40} ({e}); write it as JSON") from None
    if isinstance(type, pyarrow.StructType):
        return arrow_row(value, type)
    is_list = isinstance(value, list) and not isinstance(type, pyarrow.MapType | pyarrow.BaseExtensionType)
    if is_list and not pyarrow.types.is_primitive(type.value_type):
        return [_arrow_value(v, type.value_type) for v in value]
    return value


class ParquetFile:
    """A Parquet file, through an Arrow copy that is memory-mapped."""

    def __init__(self, path: str) -> None:
        self.name = path
        self._size = os.stat(path).st_size
        self._path = cached_copy(path, ".arrow", _parquet_to_arrow)
        self._reader: pyarrow.ipc.RecordBatchFileReader | None = None
        counts = [batch.num_rows for batch in self._batches()]
        self._starts = np.cumsum([0, *counts])

    def _open(self) -> pyarrow.ipc.RecordBatchFileReader:
        if self._reader is None:
            self._reader = pyarrow.ipc.open_file(pyarrow.memory_map(self._path))
        return self._reader

    def _batches(self) -> Iterator[pyarrow.RecordBatch]:
        reader = self._open()
        return (reader.get_batch(i) for i in range(reader.num_record_batches))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        batch = self._open().get_batch(number)
        return arrow_row(batch.slice(index - int(self._starts[number]), 1).to_pylist()[0], batch.schema)

    def where(self, index: int) -> str:
        return f"{self.name}:row {index}"

    def fingerprint(self) -> dict[str, Any]:
        """Hashes both ends of the file; the footer holds sizes and statistics of every column chunk."""
        return {"name": self.name, "rows": len(self), "size": self._size, "hash": hash_of_ends(self.name, ENDS)}

    def close(self) -> None:
        self._reader = None


def hash_of_ends(path: str, length: int) -> str:
    """Returns a hash of the first and the last `length` bytes of a file."""
    with open(path, "rb") as file:
        head = file.read(length)
        file.seek(max(0, os.fstat(file.fileno()).st_size - length))
        return f"crc32:{zlib.crc32(file.read(), zlib.crc32(head)):08x}"


def kind_of(value: Any) -> str:
    """Describes a wrong value for messages: short, with the value if it helps."""
    match value:
        case None:
            return "missing or null"
        case list() | dict() | str() if not value:
            return f"an empty {type(value).__name__}"
        case list() | dict():
            return f"a {type(value).__name__}"
        case _:
            text = repr(value)
            return text if len(text) <= 40 else f"{text[:40]}..."
