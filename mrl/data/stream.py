"""An endless stream of rows in an order that is a pure function of (seed, epoch, number of rows), with a saved
position.

Epoch 0 is followed by epoch 1, and so on, each in its own order. Rows are taken across the end of an epoch, so none
is lost. Rows that cannot be used are passed over.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Generic

import numpy as np

from mrl.data.dataset import AnyRowsConfig, RejectedRow, RowDataset, T
from mrl.data.mixture import MixedDataset, Mixer, OrderedRows, SourceProgress, mixture_changes
from mrl.data.streamed import START, Cursor, Mark
from mrl.errors import CheckpointError, DataError, show

NOTES_PER_BATCH = 5
MAX_SKIPPED_IN_A_ROW = 100_000  # streamed rows in a row, none of which can be used, after which a run ends


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


@dataclasses.dataclass(frozen=True)
class Progress:
    """A position in the stream (`position` rows of `epoch` are used up) and what was met on the way to it."""

    epoch: int = 0
    position: int = 0
    skipped: int = 0
    dropped: int = 0
    truncated: int = 0
    sources: tuple[SourceProgress, ...] = ()  # of a mixture: how far each has been read; epoch and position are 0 then
    mark: Mark = START  # of one path that is streamed: where the block of the next row begins


@dataclasses.dataclass
class Report:
    """Rows skipped as bad, dropped as too long, and truncated; `notes` name some of those left out."""

    skipped: int = 0
    dropped: int = 0
    truncated: int = 0
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """As `RowStream.counts`."""
        return {"skipped": self.skipped, "dropped": self.dropped, "truncated": self.truncated}

    def count(self, dataset: RowDataset[T], row: int) -> T | None:
        """Loads a row and counts what became of it; None where it is left out."""
        loaded = dataset.load(row)
        if not isinstance(loaded, RejectedRow):
            self.truncated += loaded.truncated
            return loaded
        if loaded.outcome == "skipped":
            self.skipped += 1
        else:
            self.dropped += 1
        dataset.leave_out(loaded.why)
        if len(self.notes) < NOTES_PER_BATCH:
            self.notes.append(f"{loaded.outcome}: {loaded.why}")
        return None

    def no_rows_left(self, dataset: RowDataset[T]) -> DataError:
        return DataError(
            f"data.{dataset.part}", why=f"{dataset.path}: none of its {dataset.size} can be used; {self.notes[0]}"
        )


def may_leave_out(config: AnyRowsConfig) -> bool:
    """Returns whether rows may be left out, so that fewer than all of them fill the batches."""
    return config.truncation == "drop" or config.on_bad_row == "skip"


def count_usable(dataset: RowDataset[T]) -> tuple[int, dict[str, int]]:
    """Returns the number of usable rows, and counts as `RowStream.counts`: one pass that encodes every row, the same on
    every rank.

    Raises DataError as `RowDataset.load` does, and if no row is left.
    """
    report = Report()
    return sum(1 for _ in usable_rows(dataset, report)), report.counts


def usable_rows(dataset: RowDataset[T], report: Report) -> Iterator[tuple[int, T]]:
    """Yields each usable row once, with its index, and fills `report`. Raises DataError where there is none."""
    is_empty = True
    for index in range(len(dataset)):
        row = report.count(dataset, index)
        if row is not None:
            is_empty = False
            yield index, row
    if is_empty:
        raise report.no_rows_left(dataset)


def usable_of_mixture(dataset: MixedDataset[Any], seed: int, *, shuffle: bool = True) -> list[tuple[int, int | None]]:
    """Returns of each source its rows that can be used, and how many its epochs let a run have; None for no bound.

    Reads every row where some may be left out.
    """

    def order(name: str, epoch: int, rows: int) -> np.ndarray:
        return row_order(seed_of(seed, name), epoch, rows, shuffle)

    report, is_usable = Report(), np.ones(len(dataset), dtype=bool)
    if may_leave_out(dataset.config):
        is_usable[:] = [report.count(dataset, row) is not None for row in range(len(dataset))]
    if not is_usable.any():
        raise report.no_rows_left(dataset)
    found = []
    for number, last in enumerate(Mixer(dataset, order).last):
        flags = is_usable[dataset.starts[number] : dataset.starts[number + 1]]
        most = None
        if last is not None:
            epochs, rest = divmod(last, len(flags))
            in_part = order(dataset.shares[number].title, epochs, len(flags))[:rest]
            most = epochs * int(flags.sum()) + int(flags[in_part].sum())
        found.append((int(flags.sum()), most))
    return found


@dataclasses.dataclass(frozen=True)
class TakenRows(Generic[T]):
    """Rows that were taken from a stream."""

    items: list[T]  # what the rows became
    rows: list[int]  # their indices
    progress: Progress  # the position after them
    notes: list[str]  # as in Report


class RowStream(Generic[T]):
    """The rows of a data set without end; the position of what was taken can be saved and continued exactly."""

    def __init__(self, dataset: RowDataset[T], *, seed: int, shuffle: bool = True) -> None:
        self.dataset, self.seed, self.shuffle = dataset, seed, shuffle
        self.rows: list[int] = []  # row indices of what was taken last; `dataset.where` names them
        self._progress = Progress()
        self._notes: list[str] = []
        self.mixer = Mixer(dataset, self._order_of_source) if isinstance(dataset, MixedDataset) else None
        if self.mixer is None:
            self._fingerprint = dataset.fingerprint()
            self._ordered = OrderedRows(dataset, self._epoch_order, self._order_of_source)
        else:
            self._fingerprints = [source.fingerprint() for source in self.mixer.dataset.sources]
            self._progress = Progress(sources=(SourceProgress(),) * len(self.mixer.weights))
        self._start = self._progress

    @property
    def counts(self) -> dict[str, int]:
        """Rows skipped (bad), dropped (too long) and truncated since the start of the run, also before a resume."""
        return {name: getattr(self._progress, name) for name in ("skipped", "dropped", "truncated")}

    def taken_from(self) -> list[str]:
        """Returns the file and line of each row that was taken last."""
        return [self.dataset.where(row) for row in self.rows]

    def take_notes(self) -> list[str]:
        """Returns a line for each of the first few rows left out of what was taken since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def _after(self, start: Progress, count: int) -> TakenRows[T]:
        """Returns the `count` usable rows that follow `start`: a pure function of it and of the settings."""
        report, reads = Report(), list(start.sources)  # no sources without a mixture
        items: list[T] = []
        rows: list[int] = []
        at = Cursor(start.epoch, start.position, start.mark)  # of one path; it stays at the start in a mixture
        fruitless = collections.Counter[int]()
        while len(items) < count:
            number, source = 0, self.dataset
            if self.mixer is None:
                row, at = self._ordered.take(at)
                item = report.count(self.dataset, row)
            else:
                number = self.mixer.choose(reads)
                source = self.mixer.dataset.sources[number]
                row, cursor = self.mixer.row(number, reads[number])
                item = report.count(self.dataset, row)
                self.mixer.record_read(reads, number, cursor, item)
            if item is not None:
                items.append(item)
                rows.append(row)
                fruitless[number] = 0
                continue
            fruitless[number] += 1
            if fruitless[number] > (MAX_SKIPPED_IN_A_ROW if source.is_streamed else len(source)):
                raise report.no_rows_left(source)
        progress = Progress(
            at.epoch, at.position, start.skipped + report.skipped, start.dropped + report.dropped,
            start.truncated + report.truncated, tuple(reads), at.mark,
        )  # fmt: skip
        return TakenRows(items, rows, progress, report.notes)

    def walk(self) -> Iterator[TakenRows[T]]:
        """Yields the rows of the run from its beginning, one at a time, and moves nothing."""
        progress = self._start
        while True:
            taken = self._after(progress, 1)
            yield taken
            progress = taken.progress

    @property
    def metrics(self) -> dict[str, float]:
        """Rows, tokens and passes of each source of a mixture since the start of the run."""
        if self.mixer is None:
            return {}
        metrics: dict[str, float] = {}
        dataset = self.mixer.dataset
        for share, source, read in zip(dataset.shares, dataset.sources, self._progress.sources, strict=True):
            epochs = read.epoch + (0 if source.is_streamed else read.position / len(source))
            values = {"rows": read.rows, "tokens": read.tokens, "epochs": epochs}
            metrics |= {f"data/{share.title}/{what}": value for what, value in values.items()}
        return metrics

    def _order_of_source(self, name: str, epoch: int, rows: int) -> np.ndarray:
        return row_order(seed_of(self.seed, name), epoch, rows, self.shuffle)

    def _moved(self, taken: TakenRows[T]) -> None:
        """Moves the position behind `taken`."""
        self.rows, self._progress = taken.rows, taken.progress
        self._notes += taken.notes

    def _epoch_order(self, epoch: int, rows: int) -> np.ndarray:
        return row_order(self.seed, epoch, rows, self.shuffle)

    # ---------------------------------------------------------------------------------------------------- resume

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after what was taken last, with what it means: plain numbers, strings, lists."""
        made = dataclasses.asdict(self._progress)
        del made["sources"]
        if self.mixer is not None or not self.dataset.is_streamed:
            del made["mark"]
        same = {"seed": self.seed, "shuffle": self.shuffle}
        if self.mixer is None:
            return {"version": 1, **made, **same, "data": self._fingerprint}
        mix_by = self.mixer.dataset.config.mix_by
        return {"version": 2, **made, **same, "mix_by": mix_by, "sources": self._state_of_sources(self.mixer)}

    def _state_of_sources(self, mixer: Mixer) -> list[dict[str, Any]]:
        dataset, states = mixer.dataset, []
        for number, (share, read) in enumerate(zip(dataset.shares, self._progress.sources, strict=True)):
            position = dataclasses.asdict(read)
            if not dataset.sources[number].is_streamed:
                del position["mark"]
            states.append({
                "name": share.title, "weight": share.weight, "epochs": share.epochs, "settings": mixer.settings(number),
                "data": self._fingerprints[number], **position,
            })  # fmt: skip
        return states

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues after what was taken last when `state` was made.

        Raises CheckpointError where the position would mean other rows: the data, the seed or the shuffle changed.
        Files may have moved. The number of rows that are taken at a time may differ: the position counts rows.
        """
        version = 1 if self.mixer is None else 2
        if state["version"] != version:
            was, now = ("one path", "a list of sources")[:: 1 if version == 2 else -1]
            why = f"is {now} and was {was} when the checkpoint was saved, and their orders have nothing in common"
            fix = f"give {was} again, or start a new run in another output_dir from its hf/"
            raise CheckpointError("data.train", why=why, fix=fix)
        for name, value in (("seed", self.seed), ("data.shuffle", self.shuffle)):
            saved = state[name.removeprefix("data.")]
            if saved != value:
                why = f"is {value} and was {saved} when the checkpoint was saved, so the rows would have another order"
                raise CheckpointError(name, why=why, fix=f"set it to {saved}, or start a new run in another output_dir")
        self.rows, self._notes = [], []
        sources = () if self.mixer is None else self._resumed_sources(self.mixer, state)
        if self.mixer is None:
            _check_same(f"data.{self.dataset.part}", state["data"], self._fingerprint)
        position = {name: state[name] for name in ("epoch", "position", "skipped", "dropped", "truncated")}
        self._progress = Progress(**position, sources=sources, mark=tuple(state.get("mark", START)))

    def _resumed_sources(self, mixer: Mixer, state: Mapping[str, Any]) -> tuple[SourceProgress, ...]:
        """Returns how far each source had been read when `state` was made; notes what is mixed otherwise now."""
        before = {entry["name"]: entry for entry in state["sources"]}
        now = self._state_of_sources(mixer)
        reads = []
        for entry, source in zip(now, mixer.dataset.sources, strict=True):
            saved = before.get(entry["name"], entry)
            key = f"data.train, source {entry['name']}"
            for name, value in entry["settings"].items():
                was = saved["settings"].get(name)
                if was == value:
                    continue
                if name == "format" and "auto" in (was, value) and source.detected_form() in (was, value):
                    continue  # one of the two is auto, and finds the other in the rows, which are the same
                why = f"is {show(value)} and was {show(was)} when the checkpoint was saved: rows would become others"
                fix = "set it back, or give the source another name to begin it anew"
                raise CheckpointError(f"{key}, {name}", why=why, fix=fix)
            _check_same(key, saved["data"], entry["data"])
            position = {name: saved[name] for name in ("epoch", "position", "rows", "tokens", "given")}
            reads.append(SourceProgress(**position, mark=tuple(saved.get("mark", START))))
        words = mixture_changes(state["sources"], now)
        if state["mix_by"] != (mix_by := mixer.dataset.config.mix_by):
            words.append(f"data.mix_by was {state['mix_by']} and is {mix_by}")
        if words:
            self._notes.append(f"data.train: {'; '.join(words)}: shares count from here")
            reads = [dataclasses.replace(read, given=0) for read in reads]
        return tuple(reads)


def _check_same(key: str, saved: list[dict[str, Any]], now: list[dict[str, Any]]) -> None:
    """Raises CheckpointError if the data of `key` has changed. A hub id that has moved on can be named at a commit."""
    if change := _data_change(saved, now):
        why = f"{change}, and the position in the checkpoint means other rows now; the run has read {saved[0]['name']}"
        fix = "put the data back, name the hub's files at the commit that was read, or start a new run"
        raise CheckpointError(key, why=why, fix=fix)


def _data_change(saved: list[dict[str, Any]], now: list[dict[str, Any]]) -> str | None:
    """Describes the difference between two fingerprints, None where there is none; names of files may differ."""
    if len(saved) != len(now):
        return f"has {len(now)} files and had {len(saved)} when the checkpoint was saved"
    for before, after in zip(saved, now, strict=True):
        for what in ("rows", "size", "hash"):
            if before[what] != after[what]:
                return f"{after['name']} has {what} {after[what]} and had {before[what]} when the checkpoint was saved"
    return None
