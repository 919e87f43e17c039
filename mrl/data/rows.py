"""Rows of a data set by index, wherever they are: files, a folder or glob of files, a saved data set, a hub id.

    rows = open_rows("data/*.jsonl.gz", split=None, part="train")
    len(rows); rows[7]; rows.where(7)            # 'data/a.jsonl.gz:8'

A folder gives its data files in the order of their names (other files are left alone, sub-folders need a glob); it may
not hold several splits. `split` names a split of a saved data set or hub id. A hub id may carry a configuration:
`openai/gsm8k:main`.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import pyarrow

from mrl.config.sources import FORMS
from mrl.config.urls import shown_url
from mrl.data.files import SUFFIXES, JsonlFile, ParquetFile, arrow_row, open_file
from mrl.data.remote import RemoteFile, find_files, local_file
from mrl.data.splits import NamedFiles, check_splits, files_of_path
from mrl.data.streamed import Exchange, StreamedRows
from mrl.errors import DataError

Part = Literal["train", "eval"]

DEFAULT_SPLITS: Mapping[str, tuple[str, ...]] = {"train": ("train",), "eval": ("test", "validation")}
OPEN_FILES = 64  # file handles held at a time; a data set may have thousands of files
END_ROWS = 64  # rows hashed at each end of a `datasets` data set


class Rows:
    """The rows of several sources, one after the other. Reads are not thread-safe."""

    def __init__(self, sources: Sequence[JsonlFile | ParquetFile | DatasetRows], named: NamedFiles) -> None:
        """Opens no source yet. named: the files of the sources."""
        self.named = named
        self._sources = list(sources)
        self._starts = np.cumsum([0, *(len(s) for s in self._sources)])
        self._open: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _find(self, index: int) -> tuple[int, int]:
        assert 0 <= index < len(self), f"row {index} of {len(self)}"
        source = int(np.searchsorted(self._starts, index, side="right")) - 1
        return source, index - int(self._starts[source])

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns the row as a fresh dict. Raises BadRow where it is no JSON object."""
        source, row = self._find(index)
        self._open[source] = None
        self._open.move_to_end(source)
        if len(self._open) > OPEN_FILES:
            self._sources[self._open.popitem(last=False)[0]].close()
        return self._sources[source][row]

    def where(self, index: int) -> str:
        """Returns `file:line` of a row, or `file:row N` (from 0) where a file has no lines."""
        source, row = self._find(index)
        return self._sources[source].where(row)

    def head(self) -> Iterator[int]:
        """Yields the indices of rows, of the first one first."""
        yield from range(len(self))

    def folder(self, index: int) -> str:
        """Returns the folder of relative paths in a row: that of its file or its saved data set."""
        return os.path.dirname(os.path.abspath(self._sources[self._find(index)[0]].name))

    def fingerprint(self) -> list[dict[str, Any]]:
        """Returns {"name", "rows", "size", "hash"} of each source."""
        return [source.fingerprint() for source in self._sources]


def open_stream(path: str, *, split: str | None, buffer: int, exchange: Exchange) -> StreamedRows:
    """Returns the rows at `path`, a path, URL or hub id of data.train, to be read while training. buffer, exchange: see
    `StreamedRows`."""
    local = os.path.expanduser(path)

    def find() -> tuple[list[RemoteFile], NamedFiles]:
        if _is_saved_dataset(local):
            why = f"{path} is a saved data set, which lies on the disk and is read in place"
            raise DataError("data.train", why=why, fix="leave stream out")
        is_url = "://" in path
        here = [] if is_url else _data_files(local, split, "train")
        files = [local_file(file) for file in here] or find_files(path, split=split, key="data.train")
        names = [file.name for file in files]
        if here or is_url:
            return files, files_of_path("data.train", path, names)
        return files, NamedFiles("data.train", path, names, f"{path} {split or 'train'}", is_chosen=True)

    return StreamedRows(find, buffer=buffer, key="data.train", what=shown_url(path), exchange=exchange)


def _load_saved(path: str) -> Any:
    try:
        return datasets.load_from_disk(path)
    except (OSError, ValueError, KeyError, pyarrow.ArrowException) as e:
        raise DataError(path, why=f"is a saved data set that cannot be read ({e})", fix="save it again") from e


def open_rows(path: str, *, split: str | None, part: Part) -> Rows:
    """Returns the rows at `path`; `part`: of data.train or data.eval. Raises DataError; empty is an error."""
    local = os.path.expanduser(path)
    if _is_saved_dataset(local):
        rows = _choose_split(local, _load_saved(local), split, part, {})
    elif files := _data_files(local, split, part):
        of_files = files_of_path(f"data.{part}", path, files)
        check_splits([of_files])
        sources = [open_file(file) for file in files]
        for source in sources:
            source.close()  # reads open again what they need
        rows = Rows(sources, of_files)
    else:
        rows = _load_hub(path, split, part)
        check_splits([rows.named])
    if not len(rows):
        raise DataError(f"data.{part}", why=f"{path}: the data set is empty", fix="at least one row is needed")
    return rows


# ------------------------------------------------------------------------------------------------------------- files


def _data_files(path: str, split: str | None, part: Part) -> list[str]:
    """Returns the files that `path` means, sorted; none if it looks like a hub id. Raises DataError, also for a split
    of files."""
    key, known = f"data.{part}", f"use {', '.join(SUFFIXES)}"
    if os.path.isdir(path):
        names = sorted(n for n in os.listdir(path) if n.endswith(SUFFIXES) and not n.startswith("."))
        files = [os.path.join(path, n) for n in names]
        fix = f"{known}; for files in sub-folders give a glob, as {path.rstrip('/')}/**/*.jsonl"
    elif os.path.isfile(path):
        files, fix = [path], ""
    elif glob.has_magic(path):
        files = sorted(f for f in glob.glob(path, recursive=True) if not os.path.isdir(f))
        fix = "a glob looks like data/*.jsonl or data/**/*.parquet"
    else:
        hub_id = r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?"
        if path.endswith(SUFFIXES) or path.startswith(("/", ".", "~")) or not re.fullmatch(hub_id, path):
            why = f"{path}: there is no such file or folder (from {os.getcwd()})"
            raise DataError(key, why=why, fix=f"give {FORMS}")
        return []
    if not files:
        raise DataError(key, why=f"{path}: there is no data file", fix=fix)
    for file in files:
        if not file.endswith(SUFFIXES):
            raise DataError(key, why=f"{file}: the suffix is not known", fix=known)
    if split is not None:
        why = f"{split!r}, but {key} ({path}) is files, which have no splits"
        raise DataError("data.split", why=why, fix="remove data.split and name the files of that split")
    return files


# ------------------------------------------------------------------------------------------------------ `datasets`


class DatasetRows:
    """Rows of a `datasets.Dataset`, which maps its Arrow files into memory; images as they are stored, not decoded."""

    def __init__(self, name: str, dataset: datasets.Dataset) -> None:
        self.name = name
        self._dataset = dataset.with_format("arrow")

    def __len__(self) -> int:
        return self._dataset.num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        table = self._dataset[index]
        return arrow_row(table.to_pylist()[0], table.schema)

    def where(self, index: int) -> str:
        return f"{self.name}:row {index}"

    def fingerprint(self) -> dict[str, Any]:
        """Hashes the column types and the rows at both ends."""
        n, digest = len(self), hashlib.sha256(str(self._dataset.features).encode())
        for i in sorted({*range(min(n, END_ROWS)), *range(max(0, n - END_ROWS), n)}):
            digest.update(json.dumps(self._dataset[i].to_pylist()[0], sort_keys=True, default=str).encode())
        return {
            "name": self.name,
            "rows": n,
            "size": self._dataset.data.nbytes,
            "hash": f"sha256:{digest.hexdigest()[:16]}",
        }

    def close(self) -> None:
        pass


def _is_saved_dataset(path: str) -> bool:
    """Returns whether `datasets.save_to_disk` wrote the folder, for one data set or for several splits."""
    folder = Path(path)
    return (folder / "dataset_dict.json").is_file() or (
        (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    )


def _load_hub(path: str, split: str | None, part: Part) -> Rows:
    name, _, configuration = path.partition(":")
    try:
        builder = datasets.load_dataset_builder(name, configuration or None)  # as `load_dataset`, with its files
        builder.download_and_prepare()
        loaded = builder.as_dataset()
    except Exception as e:  # no network, no such id, a broken file: the library has no common error
        why = f"{path}: is no file or folder here, and datasets cannot load it as a hub id ({type(e).__name__}: {e})"
        fix = f"give {FORMS} that is cached or can be downloaded, as openai/gsm8k:main"
        raise DataError(f"data.{part}", why=why, fix=fix) from e
    return _choose_split(path, loaded, split, part, builder.config.data_files or {})


def _choose_split(path: str, loaded: Any, split: str | None, part: Part, files: Mapping[str, Sequence[str]]) -> Rows:
    """Returns one data set out of what `datasets` loaded. files: of each split, where they are known."""
    if isinstance(loaded, datasets.Dataset):
        if split is not None and split != str(loaded.split):
            why = f"{split!r}, but {path} holds a data set without splits"
            raise DataError("data.split", why=why, fix="remove data.split")
        return _rows_of(path, loaded, part, ())
    wanted = DEFAULT_SPLITS[part] if split is None else (split,)
    for name in wanted:
        if name in loaded:
            return _rows_of(f"{path}[{name}]", loaded[name], part, files.get(name, ()))
    why = f"{path}: has no split {' or '.join(wanted)}; it has {', '.join(map(str, loaded))}"
    fix = "set data.split to one of them" if part == "train" else "save the one you mean and give its folder"
    raise DataError(f"data.{part}", why=why, fix=fix)


def _rows_of(name: str, dataset: datasets.Dataset, part: Part, files: Sequence[str]) -> Rows:
    """Returns the rows of one data set. files: its own, if they are known."""
    return Rows([DatasetRows(name, dataset)], NamedFiles(f"data.{part}", name, files or (name,), name, is_chosen=True))
