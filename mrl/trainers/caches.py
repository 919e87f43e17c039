"""Keeps what a frozen model says of rows, a reference or a teacher, in files beside the run.

Dimensions: `N` entries of all rows of a batch end to end, as many of each row as its model says.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import pathlib
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mrl.batch import Batch
from mrl.config.megatron_speed import precision_of
from mrl.config.schema import EngineConfig
from mrl.engine import collective
from mrl.errors import CheckpointError, unwritable
from mrl.trainers.trainer import Trainer
from mrl.weights.pt_file import read_pt, write_pt

logger = logging.getLogger(__name__)

Said = Mapping[str, Tensor]
"""Field -> [N, ...], what a model says of a batch."""

_DIGEST_BYTES = 16


def digests(batch: Batch) -> list[bytes]:
    """Returns a name for each sequence of a batch: of its tokens, of which of them train, and of its images."""
    fields = (batch.tokens, batch.labels, batch.loss_mask != 0)
    parts = [part.numpy().tobytes() for field in fields for part in field.cpu().split(batch.lengths.tolist())]
    count = batch.num_sequences
    images = [_image_bytes(inputs) for inputs in batch.multi_modal_inputs] or [b""] * count
    return [hashlib.sha256(b"".join(parts[i::count]) + images[i]).digest()[:_DIGEST_BYTES] for i in range(count)]


def _image_bytes(inputs: Mapping[str, Tensor]) -> bytes:
    """Returns what tells the images of a sequence from others; nothing of one without."""
    return b"".join(
        f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode()
        + tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        for name, tensor in sorted(inputs.items())
    )


def with_precision(engine: EngineConfig) -> dict[str, Any]:
    """Returns, as an entry of what numbers are made by, an engine's choice of fp8; nothing where it has none."""
    settings = precision_of(engine.megatron)
    return {"precision": settings} if settings else {}


def saved_by(path: pathlib.Path, made_by: str, *, fields: Collection[str]) -> dict[str, Any] | None:
    """Returns what a cache's file holds; None where there is none, it was made by something else, or is damaged."""
    if not path.exists():
        return None
    try:
        saved = read_pt(path, fields=("made_by", *fields), mmap=True)
    except CheckpointError as error:
        logger.warning("%s: %s, and is made anew", path, error.why)
        return None
    return saved if saved["made_by"] == made_by else None


class RowCache:
    """Holds what a model says of rows, by the tokens of rows, in files of a folder. The files are mapped into memory.

    made_by: what it depends on beside the tokens. Files that say otherwise are replaced. fields: of `Said`. per_token:
    whether a row has an entry for each trained token, or one. Only the main process writes.
    """

    max_bytes = 2**27
    """The most that is said of rows and waits in memory for the next file."""

    write_every_s = 60.0
    """The longest that it waits there: a run that is killed goes on from the files that are whole."""

    def __init__(
        self, folder: pathlib.Path, made_by: Mapping[str, Any], fields: tuple[str, ...], *, per_token: bool
    ) -> None:
        self.folder, self.made_by = folder, json.dumps(made_by, sort_keys=True)
        self.fields, self._per_token = fields, per_token
        self.files: list[Said] = []
        self.places: dict[bytes, tuple[int, slice]] = {}  # of a row: which file, and where in it
        self._unread: list[pathlib.Path] = []  # made by something else, or damaged
        self._waiting: dict[bytes, Said] = {}  # rows for the next file
        self._bytes, self._written_s = 0, time.monotonic()
        self._added: set[bytes] = set()  # rows in files that were not there yet at the last `read`

    @property
    def count(self) -> int:
        """Rows that are known."""
        return len(self.places) + len(self._added) + len(self._waiting)

    @property
    def has_others(self) -> bool:
        """Whether `read` left out a file: made by something else, or damaged."""
        return bool(self._unread)

    def read(self, names: Sequence[str]) -> list[str]:
        """Reads those of the files that were made by the same, and returns their names."""
        read = []
        self.files, self.places, self._unread = [], {}, []
        self._added.clear()
        for path in (self.folder / name for name in names):
            saved = saved_by(path, self.made_by, fields=("names", "counts", *self.fields))
            if saved is None:
                self._unread.append(path)
                continue
            read.append(path.name)
            ends = saved["counts"].cumsum(0).tolist()
            for name, *place in zip(saved["names"].numpy(), [0, *ends[:-1]], ends, strict=True):
                self.places[name.tobytes()] = len(self.files), slice(*place)
            self.files.append({field: saved[field] for field in self.fields})
        return read

    def add(self, batch: Batch, said: Said) -> None:
        """Adds what is said of unknown rows, and writes it if that is due. What is known stays, to the bit."""
        names, counts = digests(batch), [1] * batch.num_sequences
        if self._per_token:
            counts = [int(part.count_nonzero()) for part in batch.loss_mask.split(batch.lengths.tolist())]
        parts = {field: said[field].split(counts) for field in self.fields}
        for row, name in enumerate(names):
            if not (name in self.places or name in self._added or name in self._waiting):
                self._waiting[name] = {field: of_rows[row].clone() for field, of_rows in parts.items()}
                self._bytes += sum(tensor.nbytes for tensor in self._waiting[name].values())
        if self._bytes >= self.max_bytes or time.monotonic() - self._written_s >= self.write_every_s:
            self.write()

    def write(self) -> str | None:
        """Writes what is added to a file of its own, whole or not at all. Returns the folder; None where nothing is
        known. Raises ConfigError if the disk refuses it."""
        if self._waiting:
            rows, names = list(self._waiting.values()), bytearray(b"".join(self._waiting))
            content = {
                "made_by": self.made_by,
                "names": torch.frombuffer(names, dtype=torch.uint8).view(-1, _DIGEST_BYTES),
                "counts": torch.tensor([len(row[self.fields[0]]) for row in rows]),
                **{field: torch.cat([row[field] for row in rows]) for field in self.fields},
            }
            path = self._next_file()
            try:
                write_pt(path, content)
            except OSError as error:
                raise unwritable(str(self.folder.parent), path, error) from error
            for unread in self._unread:
                unread.unlink(missing_ok=True)
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

    def of(self, batch: Batch) -> Said:
        """Returns what was said of a batch. KeyError: a row is in no file that was read."""
        found = [self.places[name] for name in digests(batch)]
        return {field: torch.cat([self.files[file][field][at] for file, at in found]) for field in self.fields}


def fill(
    cache: RowCache,
    batches: Iterable[Batch],
    build: Callable[[], Callable[[Batch], Said]],
    trainer: Trainer,
    *,
    name: str,
    what: str,
) -> None:
    """Reads a cache, and asks a frozen model about all rows that it lacks: a pass before the first step. Collective.

    build: builds the model, and returns what asks it. name: of the model. what: its log-probs, in words.
    Raises Stopped after a signal, once what is known is written.
    """
    dispatch, console = trainer.dispatch, trainer.console

    def read() -> list[str]:
        """Reads the same files on every rank, since a node may not see yet what another one wrote. Returns those that
        some ranks alone can read, if the main process knows rows by them alone."""
        names = dispatch.on_main(lambda: sorted(path.name for path in cache.folder.glob("log_probs*.pt")))
        of_ranks = [set(of_rank) for of_rank in collective.all_ranks().gather(cache.read(names))]
        of_some = set.union(*of_ranks) - set.intersection(*of_ranks)
        if not of_some:
            return []
        known = set(cache.places)
        cache.read([name for name in names if name not in of_some])
        return sorted(of_some) if dispatch.on_main(lambda: not known <= cache.places.keys()) else []

    read()
    missing = cache.lacks(batches)
    first = next(missing, None)
    if first is None:
        console.say(f"{name}: its log-probs of {cache.count:,} rows are in {cache.folder}")
        return
    if cache.count:
        console.say(f"{name}: goes on from its log-probs of {cache.count:,} rows in {cache.folder}")
    if cache.has_others:
        console.say(f"{name}: files in {cache.folder} are damaged, or of another model or config, and are made anew")
    ask = build()
    console.doing(f"computing {what}")
    for batch in itertools.chain([first], missing):
        if trainer.stop_requested:
            saved = dispatch.on_main(cache.write)
            raise trainer.stopped(saved, f"while {what} were computed")
        said = ask(batch)
        dispatch.on_main(lambda: cache.add(batch, said))  # noqa: B023 (called here)
        console.detail(f"{cache.count:,} rows")
    dispatch.on_main(cache.write)
    dispatch.engines.pop(name, None)
    console.say(f"{name}: its log-probs of {cache.count:,} rows are written to {cache.folder}")
    if unseen := read():
        fix = "give an output_dir that all nodes see, or start the same command again"
        raise CheckpointError(cache.folder / unseen[0], why="cannot be read on every rank", fix=fix)
