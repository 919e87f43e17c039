"""Keeps the answers of a teacher of `mrl sft` on rows, in files beside the run.

Dimensions: `N` trained tokens of a batch, `K` ids of each, the teacher's likeliest first.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mrl.batch import Batch
from mrl.roles.dispatch import WorkerDispatch
from mrl.trainers.caches import as_tensor, digests, from_tensor, logger, save_cache, saved_by


@dataclasses.dataclass(frozen=True)
class TopTokens:
    """A teacher's answers for the trained tokens of a batch, in their order."""

    ids: Tensor  # [N, K] int32
    log_probs: Tensor  # [N, K] fp32, largest first


class TopCache:
    """Holds a teacher's answers by the tokens of rows, in files of a folder. The files are mapped into memory.

    made_by: what it depends on beside the tokens. Files that say otherwise are replaced.
    """

    max_bytes = 2**27
    """The most that is said of rows and waits in memory for the next file."""

    write_every_s = 60.0
    """The longest that it waits there: a run that is killed goes on from the files that are whole."""

    def __init__(self, folder: pathlib.Path, made_by: Mapping[str, Any]) -> None:
        self.folder, self.made_by = folder, json.dumps(made_by, sort_keys=True)
        self.files: list[TopTokens] = []
        self.places: dict[bytes, tuple[int, slice]] = {}  # of a row: which file, and where in it
        self._unread: list[pathlib.Path] = []  # made by something else, or damaged
        self._waiting: dict[bytes, TopTokens] = {}  # rows for the next file
        self._bytes, self._written_s = 0, time.monotonic()
        self._added: set[bytes] = set()  # rows in files that were not there yet at the last `read`

    @property
    def counted(self) -> str:
        """How many rows are known, in words; empty for none."""
        return f"{self.count:,} rows" if self.count else ""

    @property
    def place(self) -> pathlib.Path:
        """The folder."""
        return self.folder

    @property
    def count(self) -> int:
        """Rows that are known."""
        return len(self.places) + len(self._added) + len(self._waiting)

    @property
    def has_others(self) -> bool:
        """Whether `read` left out a file: made by something else, or damaged."""
        return bool(self._unread)

    def read(self) -> None:
        """Reads the files that were made by the same."""
        self.files, self.places, self._unread = [], {}, []
        self._added.clear()
        notes: list[str] = []
        for path in sorted(self.folder.glob("log_probs*.pt")):
            saved = saved_by(
                path, self.made_by, fields=("names", "counts", "ids", "log_probs"), mmap=True, say=notes.append
            )
            if saved is None:
                self._unread.append(path)
                continue
            ends = saved["counts"].cumsum(0).tolist()
            for name, *place in zip(from_tensor(saved["names"]), [0, *ends[:-1]], ends, strict=True):
                self.places[name] = len(self.files), slice(*place)
            self.files.append(TopTokens(saved["ids"], saved["log_probs"]))
        if notes:
            more = f" (so are {len(notes) - 1} more files)" if len(notes) > 1 else ""
            logger.warning("%s%s", notes[0], more)

    def keep(self, dispatch: WorkerDispatch, batch: Batch, found: TopTokens) -> None:
        """Adds answers on the main process. Collective."""
        dispatch.on_main(lambda: self.add(batch, found))

    def add(self, batch: Batch, found: TopTokens) -> int:
        """Adds the answers on unknown rows, and writes them if that is due. Returns `count`."""
        counts = [int(part.count_nonzero()) for part in batch.loss_mask.split(batch.lengths.tolist())]
        each = zip(digests(batch), found.ids.split(counts), found.log_probs.split(counts), strict=True)
        for name, ids, log_probs in each:
            if not (name in self.places or name in self._added or name in self._waiting):
                self._waiting[name] = TopTokens(ids.clone(), log_probs.clone())
                self._bytes += ids.nbytes + log_probs.nbytes
        if self._bytes >= self.max_bytes or time.monotonic() - self._written_s >= self.write_every_s:
            self.write()
        return self.count

    def write(self) -> str | None:
        """Writes what is added to a file of its own, whole or not at all. Returns the folder; None where nothing is
        known."""
        if self._waiting:
            parts = list(self._waiting.values())
            save_cache(self._next_file(), {
                "made_by": self.made_by,
                "names": as_tensor(self._waiting),
                "counts": torch.tensor([len(part.ids) for part in parts]),
                "ids": torch.cat([part.ids for part in parts]),
                "log_probs": torch.cat([part.log_probs for part in parts]),
            })  # fmt: skip
            for path in self._unread:
                path.unlink(missing_ok=True)
            self._unread = []
            self._added |= self._waiting.keys()
            self._waiting, self._bytes = {}, 0
        self._written_s = time.monotonic()
        return str(self.folder) if self.count else None

    def _next_file(self) -> pathlib.Path:
        found = [re.fullmatch(r"log_probs-(\d+)\.pt", path.name) for path in self.folder.glob("log_probs-*.pt")]
        number = max((int(match[1]) for match in found if match), default=-1) + 1
        return self.folder / f"log_probs-{number:05}.pt"

    def lacks(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yields the batches with a row of no file that was read."""
        for batch in batches:
            if not self.places.keys() >= set(digests(batch)):
                yield batch

    def of(self, batch: Batch) -> TopTokens:
        """Returns what was said of a batch. KeyError: a row is in no file that was read."""
        found = [(self.files[file], at) for file, at in (self.places[name] for name in digests(batch))]
        return TopTokens(
            torch.cat([file.ids[at] for file, at in found]), torch.cat([file.log_probs[at] for file, at in found])
        )
