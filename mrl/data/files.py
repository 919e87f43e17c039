"""One data file as rows by index: JSON lines through a byte-offset index, Parquet through a memory-mapped Arrow copy.

No row is held in memory: a JSON-lines file of a million rows costs 8 MB (one offset per row) and one pass at the
start. Compressed files and Parquet, which have no random access to a row, are converted once into
`<the cache of datasets>/mrl` (moved with HF_DATASETS_CACHE). The copy's name is made from the source's path, size and
modification time, so a changed source gets a new copy. A source that changes under an open index is an error.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import json
import logging
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
from filelock import FileLock

from mrl.errors import DataError, is_full
from mrl.weights.json_file import is_deeper_than

logger = logging.getLogger(__name__)

JSONL_SUFFIXES = tuple(kind + packed for kind in (".jsonl", ".json") for packed in ("", ".gz", ".zst"))
SUFFIXES = (*JSONL_SUFFIXES, ".parquet")
MAGIC = {
    b"\x1f\x8b": "gzip; name it .jsonl.gz",
    b"\x28\xb5\x2f\xfd": "zstd; name it .jsonl.zst",
    b"PAR1": "Parquet; name it .parquet",
}
"""The first bytes of files that are no text -> what they are, and their name."""
BLANK = b"\xef\xbb\xbf \t\r\n"
BLOCK = 8 << 20  # bytes read at a time while indexing
ENDS = 1 << 20  # bytes hashed at each end of a file that is not read whole
MAX_DEPTH = 100  # levels of objects and lists in a row: templates and pickle walk it by recursion
ARROW_ROWS = 1024  # rows in a record batch of an Arrow copy
LISTS = (
    pyarrow.ListType,
    pyarrow.LargeListType,
    pyarrow.FixedSizeListType,
    pyarrow.ListViewType,
    pyarrow.LargeListViewType,
)


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
    """Returns the rows of one file, by its suffix."""
    try:
        if path.endswith(JSONL_SUFFIXES):
            return JsonlFile(path)
        return ParquetFile(path)
    except OSError as e:
        raise DataError(path, why=f"cannot be read ({one_line(e)})", fix="check the file and its permissions") from e


def one_line(error: object, limit: int = 300) -> str:
    """Returns the text of an exception on one line, without control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(error)).split())[:limit]


# ---------------------------------------------------------------------------------------------- the cache of copies


def cached_copy(path: str, suffix: str, write: Callable[[str, str], None], *, damaged: str, mend: str) -> str:
    """Returns a converted copy of `path`, made by `write(path, target)` unless one for this path, size and time exists.

    Processes wait for the first one to ask; the copy appears under its name only when it is whole. damaged: the
    error of a file that `write` cannot read. mend: what the user can do then.
    """
    with open(path, "rb") as file:  # one that cannot be read is not the copy's fault
        stat = os.fstat(file.fileno())
    key = hashlib.sha256(f"{os.path.realpath(path)}|{stat.st_size}|{stat.st_mtime_ns}|1".encode()).hexdigest()[:20]
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "mrl"
    target = folder / f"{Path(path).name[:80]}-{key}{suffix}"
    if target.exists():
        return str(target)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock_where_there_are_locks(f"{target}.lock"):
            if not target.exists():
                unfinished = f"{target}.{os.getpid()}.tmp"
                try:
                    write(path, unfinished)
                    now = os.stat(path)
                    if (now.st_size, now.st_mtime_ns) != (stat.st_size, stat.st_mtime_ns):
                        raise DataError(
                            path, why="the file changed while it was converted", fix="start again when it is written"
                        )
                    os.replace(unfinished, target)
                finally:
                    Path(unfinished).unlink(missing_ok=True)
    except (OSError, EOFError, zlib.error, pyarrow.ArrowException) as e:
        # the codec failed, and not the disk: its OSError has no error number, as that of a full disk has
        if not isinstance(e, OSError) or e.errno is None:
            raise DataError(path, why=f"{damaged} ({one_line(e)})", fix=mend) from e
        what = "with room" if is_full(e) else "that can be written"
        raise DataError(
            path,
            why=f"its copy cannot be written to {folder} ({one_line(e)})",
            fix=f"set HF_DATASETS_CACHE to a folder {what}",
        ) from e
    return str(target)


@contextlib.contextmanager
def _lock_where_there_are_locks(path: str) -> Iterator[None]:
    """Holds a lock. A file system without locks is warned about: processes that come at once each write a copy then."""
    lock = FileLock(path, fallback_to_soft=False)
    try:
        lock.acquire()
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        logger.warning("no lock in %s (%s): each process may convert the data for itself", Path(path).parent, error)
    try:
        yield
    finally:
        lock.release()


def why_not_compressed(name: str, head: bytes) -> str | None:
    """Returns what is wrong with a file that is compressed by its name and JSON by its first bytes."""
    suffix = os.path.splitext(name)[1]
    if suffix not in (".gz", ".zst") or head.lstrip(BLANK)[:1] != b"{":
        return None
    return f"is JSON that is not compressed; name it without {suffix}"


def _decompress(path: str, target: str) -> None:
    with open(path, "rb") as file:
        if why := why_not_compressed(path, file.read(64)):
            raise DataError(path, why=why)
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
        self._path = path
        if path.endswith((".gz", ".zst")):
            mend = "the file is cut off or damaged, copy it again"
            self._path = cached_copy(path, ".jsonl", _decompress, damaged="cannot be decompressed", mend=mend)
        self._file: BinaryIO | None = None
        with open(self._path, "rb") as file:
            self._stat = _identity(file)
            self._starts, self._lines, self._crc = _index_lines(file)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def where(self, index: int) -> str:
        """Returns `file:line` (from 1) of a row."""
        line = index if self._lines is None else int(self._lines[index])
        return f"{self.name}:{line + 1}"

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns the row as a fresh dict. Raises BadRow."""
        return parse_line(self._read(index), self._head)

    def _read(self, index: int) -> bytes:
        if self._file is None:
            self._file = open(self._path, "rb")  # noqa: SIM115  kept open between reads; see close()
        if _identity(self._file) != self._stat:
            raise DataError("the file changed while it was in use; start again with the new file")
        start, end = int(self._starts[index]), int(self._starts[index + 1])
        # `end` is where the next row starts, so blank lines between the two come along; JSON ignores them.
        return os.pread(self._file.fileno(), end - start, start)

    def _head(self) -> bytes:
        with open(self._path, "rb") as file:
            return file.read(4096)

    def fingerprint(self) -> dict[str, Any]:
        """Returns the identity of the content, without modification times."""
        return {"name": self.name, "rows": len(self), "size": self._stat[0], "hash": f"crc32:{self._crc:08x}"}

    def close(self) -> None:
        """Gives back the file handle; the next read opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def parse_line(line: bytes, head: Callable[[], bytes]) -> dict[str, Any]:
    """Returns the row of a line. head: returns the first bytes of its file. Raises BadRow."""
    try:
        row = parse_json(line.rstrip(b"\r\n").decode("utf-8"))
    except UnicodeDecodeError as e:
        why = _kind_of_content(head()) or f"is not UTF-8 (byte {e.start} of the line); save the file as UTF-8"
        raise BadRow(why) from None
    except json.JSONDecodeError as e:
        raise BadRow(_why_not_json(head(), json_problem(e))) from None
    if not isinstance(row, dict):
        raise BadRow(_why_not_json(head(), f"the line is {_json_kind(row)}"))
    return row


def _json_kind(value: Any) -> str:
    """Returns what a value that is no object is called in JSON."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return "an array" if isinstance(value, list) else "a string" if isinstance(value, str) else "a number"


def parse_json(text: str) -> Any:
    """Returns the value of JSON text. Raises JSONDecodeError, and BadRow if a row may not hold the value."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError:
        raise
    except ValueError:  # Python reads no longer ones
        raise BadRow("holds a number of more than 4300 digits; write it as text, or remove the row") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and is_deeper_than(value, MAX_DEPTH):
        raise _too_deep()
    return value


def json_problem(error: json.JSONDecodeError) -> str:
    """Returns what is wrong with JSON, and where in its text; `error` counts lines that the user does not see."""
    if error.msg.startswith("Unterminated string"):
        return "it ends inside a text: a quote is missing, or it is cut off"
    if not error.doc[error.pos :].strip():
        return "it is cut off: it ends inside a value"
    if error.msg == "Extra data":
        return f"it ends before character {error.pos + 1}, and more follows"
    return one_line(f"{error.msg.removesuffix(' at')} at character {error.pos + 1}")


def _kind_of_content(head: bytes) -> str | None:
    return next((f"the file is {kind}" for magic, kind in MAGIC.items() if head.startswith(magic)), None)


def _why_not_json(head: bytes, problem: str) -> str:
    if kind := _kind_of_content(head):
        return kind
    head = head.lstrip(BLANK)
    if head[:1] == b"[":
        return "the file is one JSON array; write one object per line: jq -c '.[]' in.json > out.jsonl"
    if head.rstrip() in (b"{", b"") or head[:2] in (b"{\n", b"{\r"):
        return "a JSON object is spread over several lines; write one object per line: jq -c . in.json > out.jsonl"
    return f'is not a JSON object ({problem}); each line must be one object, as {{"messages": [...]}}'


def _too_deep() -> BadRow:
    return BadRow(f"has objects or lists in more than {MAX_DEPTH} others; write it flatter, or remove the row")


def _identity(file: BinaryIO) -> tuple[int, int]:
    stat = os.fstat(file.fileno())
    return stat.st_size, stat.st_mtime_ns


def _index_lines(file: BinaryIO) -> tuple[np.ndarray, np.ndarray | None, int]:
    """Returns the starts of rows, found in one pass: (starts [rows + 1] int64, line numbers from 0 or None where row =
    line, CRC-32)."""
    ends, firsts, position, crc, begins = [], [], 0, 0, True
    while block := file.read(BLOCK):
        crc = zlib.crc32(block, crc)
        content = np.frombuffer(block, dtype=np.uint8)
        after = np.flatnonzero(content == 10) + 1
        ends.append(after + position)
        at = np.append(0, after) if begins else after
        firsts.append(content[at[at < len(block)]])
        begins = block.endswith(b"\n")
        position += len(block)
    line_ends = np.concatenate([*ends, np.array([position])]) if ends else np.zeros(0, dtype=np.int64)
    if len(line_ends) > 1 and line_ends[-1] == line_ends[-2]:  # the file ends with a newline
        line_ends = line_ends[:-1]
    starts = np.concatenate([np.zeros(1, dtype=np.int64), line_ends])
    file.seek(0)
    maybe_blank = np.concatenate(firsts) <= 32 if firsts else np.zeros(0, dtype=bool)  # a row begins with {
    if file.read(3) == b"\xef\xbb\xbf":  # a byte-order mark is no part of the first row
        starts[0], maybe_blank[0] = 3, True
    rows, lines = starts[:-1], None
    blank = [
        i
        for i in np.flatnonzero(maybe_blank).tolist()
        if not os.pread(file.fileno(), int(starts[i + 1] - starts[i]), int(starts[i])).strip()
    ]
    if blank:
        lines = np.delete(np.arange(len(rows), dtype=np.int64), blank)
        rows = rows[lines]
    return np.append(rows, position), lines, crc


# ------------------------------------------------------------------------------------------------------------ Arrow


def arrow_row(row: dict[str, Any], schema: Iterable[pyarrow.Field], *, nulls: bool = False) -> dict[str, Any]:
    """Returns a row of an Arrow table as a line of JSON would have it. Raises BadRow.

    Null fields are left out at every depth, unless `nulls`. Arrow gives every struct of a column the fields of all of
    them: a message would have `tool_calls: None` because another row has tool calls. Text of Arrow's type for JSON
    (`Json` of `datasets`) is parsed. Its own nulls stay, as those of a line do.
    """
    return {f.name: _arrow_value(row[f.name], f.type, nulls) for f in schema if nulls or row[f.name] is not None}


def _arrow_value(value: Any, type: pyarrow.DataType, nulls: bool) -> Any:
    if value is None:
        return None
    if isinstance(type, pyarrow.JsonType):
        try:
            return parse_json(value)
        except json.JSONDecodeError as e:
            raise BadRow(f"a value of type JSON is {value!r:.40} ({json_problem(e)}); write it as JSON") from None
    if isinstance(type, pyarrow.StructType):
        return arrow_row(value, type, nulls=nulls)
    if isinstance(type, LISTS) and not pyarrow.types.is_primitive(type.value_type):
        return [_arrow_value(v, type.value_type, nulls) for v in value]
    return value


class ParquetFile:
    """A Parquet file, through an Arrow copy that is memory-mapped."""

    def __init__(self, path: str) -> None:
        self.name = path
        stat = os.stat(path)
        self._size = stat.st_size
        self._path = cached_copy(
            path, ".arrow", _parquet_to_arrow, damaged="cannot be read as Parquet",
            mend="the file is damaged, write it again",
        )  # fmt: skip
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
