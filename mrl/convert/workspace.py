"""Writes a conversion into a folder next to its result. The folder gets its name when it is whole, and a killed
conversion resumes.

    OUT/                 appears at the end, by one rename
    .OUT.converting/     being written
        .plan.json       what is converted, from what; another plan starts from nothing
        .done.jsonl      one line a finished file, which is on disk: size, checksum, and its maker's own fields
        .lock            held while a conversion runs
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from filelock import FileLock, Timeout
from rich.filesize import decimal

from mrl.engine.torch_dist.data_files import ItemFile, as_bytes
from mrl.errors import ModelError, is_full
from mrl.weights.checksums import crc32_of
from mrl.weights.fsync import fsync_path, write_synced
from mrl.weights.mcore_weights import blocks_of_rows
from mrl.weights.safetensors_io import DTYPES, Shard, Slice, TensorInfo

PLAN, DONE, LOCK = ".plan.json", ".done.jsonl", ".lock"
THREADS = 2
"""Files that are written at once: while one waits for the disk, the other reads."""

FileSummary = dict[str, Any]
"""{"size": bytes, "crc32": checksum, ...} of a finished file."""


Progress = Callable[[int], Callable[[int], None]]
"""Takes the bytes in all, and returns a function that takes bytes done."""


def no_progress(count: int) -> None:
    """Shows nothing."""


def silent(total: int) -> Callable[[int], None]:
    """Is a `Progress` that shows nothing."""
    return no_progress


class Workspace:
    """Holds the folder `folder` that becomes `out`, and its lock while entered.

    plan: everything that decides the files' content, as JSON values. needed: bytes of each large file, for the check of
    the disk.

    Raises ModelError if `out` is taken, another conversion is at work, or the disk has no room. A path in `needed` that
    leads out of the folder is refused, too.
    """

    def __init__(self, out: str | Path, plan: Mapping[str, Any], needed: Mapping[str, int]) -> None:
        self.out = Path(os.path.abspath(out))
        self.folder = self.out.parent / f".{self.out.name}.converting"
        self._plan, self._needed = json.dumps(plan, sort_keys=True), dict(needed)
        outside = [file for file in needed if ".." in Path(file).parts or os.path.isabs(file)]
        if outside:
            raise ModelError(
                self.out, why=f"{outside[0]!r} is to be written, which is no file of it", fix="get the source again"
            )
        self._lock = FileLock(self.folder / LOCK, timeout=0, fallback_to_soft=False)
        self._journal = threading.Lock()
        self.done: dict[str, FileSummary] = {}

    def __enter__(self) -> "Workspace":
        check_free(self.out)
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except Timeout:
            raise ModelError(
                self.out, why="another conversion is writing it", fix="wait for it, or end it first"
            ) from None
        try:
            with self._full_disk_in_words():
                self.done = self._finished()
            self._check_disk()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._lock.release()

    def _finished(self) -> dict[str, FileSummary]:
        """Returns the files of an earlier attempt at this plan that are as they were written, and removes all else."""
        plan, done = self.folder / PLAN, {}
        if plan.is_file() and plan.read_text(encoding="utf-8") == self._plan and (self.folder / DONE).is_file():
            for line in (self.folder / DONE).read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError):  # the line that a kill cut
                    summary = json.loads(line)
                    if _is_as_written(self.folder / summary["file"], summary):
                        done[summary["file"]] = summary
        for folder, _, names in os.walk(self.folder, topdown=False):
            for name in names:
                path = Path(folder, name)
                if str(path.relative_to(self.folder)) not in done and path.name != LOCK:
                    path.unlink()
        write_synced(plan, self._plan.encode())
        write_synced(self.folder / DONE, "".join(json.dumps(summary) + "\n" for summary in done.values()).encode())
        return done

    def _check_disk(self) -> None:
        needed = sum(size for file, size in self._needed.items() if file not in self.done)
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            if not self.done:
                shutil.rmtree(self.folder)
            raise ModelError(
                self.out,
                why=f"needs {decimal(needed)} and the disk of {self.folder.parent} has {decimal(free)} free",
                fix="make room, or give another folder",
            )

    def write_all(
        self, makers: Mapping[str, Callable[[Path], FileSummary]], progress: Callable[[int], None]
    ) -> dict[str, FileSummary]:
        """Makes the files that are not done yet, several at once. Returns the summary of all, in the order of `makers`.

        makers: for each path in the folder, a function that writes the file and puts it on disk. A UserError or a full
        disk ends it; finished files stay for the next attempt.
        """
        for file in makers:
            if file in self.done:
                progress(self._needed[file])
        waiting = [file for file in makers if file not in self.done]
        stop = threading.Event()

        def make(file: str) -> None:
            if not stop.is_set():
                path = self.folder / file
                path.parent.mkdir(parents=True, exist_ok=True)
                self._record(file, makers[file](path))

        with self._full_disk_in_words(), concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            try:
                for future in concurrent.futures.as_completed([pool.submit(make, file) for file in waiting]):
                    future.result()
            except BaseException:
                stop.set()
                raise
        return {file: self.done[file] for file in makers}

    def _record(self, file: str, summary: FileSummary) -> None:
        summary = {"file": file, **summary}
        with self._journal:
            fsync_path(Path(self.folder / file).parent)
            with (self.folder / DONE).open("a", encoding="utf-8") as journal:
                journal.write(json.dumps(summary) + "\n")
                journal.flush()
                os.fsync(journal.fileno())
            self.done[file] = summary

    @contextlib.contextmanager
    def _full_disk_in_words(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not is_full(error):
                raise
            fix = f"make room and run the same command again, which goes on in {self.folder}, or remove that folder"
            raise ModelError(self.out, why=f"the disk is full ({error.strerror})", fix=fix) from error

    @contextlib.contextmanager
    def finishing(self) -> Iterator[Path]:
        """Gives the folder for the small files; then puts everything on disk and gives the folder its name."""
        with self._full_disk_in_words():
            yield self.folder
            for folder, _, names in os.walk(self.folder):
                for name in names:
                    fsync_path(Path(folder, name))
                fsync_path(Path(folder))
            check_free(self.out)
            os.rename(self.folder, self.out)
            fsync_path(self.out.parent)
            for name in (PLAN, DONE, LOCK):
                (self.out / name).unlink()


def write_tensors(
    shard: Shard,
    tensors: Mapping[str, TensorInfo],
    read: Callable[[str], Slice],
    progress: Callable[[int], None],
    path: Path,
) -> FileSummary:
    """Writes one safetensors file, from front to back."""
    file = ItemFile(path)
    try:
        file.write(shard.header)
        for name, info in tensors.items():
            assert file.size == shard.offsets[name], f"{path}: {name} at {file.size}"
            if not info.shape:
                progress(file.write(as_bytes(read(name)[()].to(DTYPES[info.dtype]))))
                continue
            for block in blocks_of_rows(read(name), info.shape, 0, info.shape[0]):
                progress(file.write(as_bytes(block.to(DTYPES[info.dtype]))))
        assert file.size == shard.size, f"{path}: {file.size} bytes, not {shard.size}"
        file.close()
    except BaseException:
        file.abort()
        raise
    return {"size": file.size, "crc32": file.crc32}


def check_free(out: Path) -> None:
    """Refuses to write over anything."""
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise ModelError(out, why="exists and is not an empty folder", fix="give another one, or remove it")


def file_versions(paths: Iterable[Path]) -> dict[str, list[int]]:
    """Returns name -> size and time of each file, which tell it from itself after a change."""
    stats = {path.name: path.stat() for path in sorted(paths)}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def _is_as_written(path: Path, summary: FileSummary) -> bool:
    return path.is_file() and path.stat().st_size == summary["size"] and crc32_of(path) == summary["crc32"]


EVERY_S = 10.0


class ProgressLines:
    """Shows a conversion's progress. A call with the bytes in all returns a function that takes bytes done, in any
    thread.

    verb: as in "imported".
    """

    def __init__(self, verb: str, stream: TextIO = sys.stderr) -> None:
        self.verb, self.stream = verb, stream
        self._lock = threading.Lock()

    def __call__(self, total: int) -> Callable[[int], None]:
        self.total, self.done = total, 0
        self._begun = self._shown = time.monotonic()
        return self._advance

    def _advance(self, count: int) -> None:
        with self._lock:
            self.done += count
            now = time.monotonic()
            if now - self._shown >= EVERY_S or self.done == self.total:
                self._shown = now
                speed = int(self.done / max(now - self._begun, 1e-3))
                line = f"{self.verb} {decimal(self.done)} of {decimal(self.total)}, {decimal(speed)}/s"
                print(line, file=self.stream, flush=True)
