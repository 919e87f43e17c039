"""Global mini-batches in an order that is a pure function of (seed, epoch, number of rows), with a saved position.

The stream of rows is endless: epoch 0, then epoch 1, and so on, each in its own order. A batch takes the next
`global_batch_size` rows of the stream that can be used, so one at the end of an epoch goes on with the next epoch:
no row is lost and every batch is full. Every rank builds the same global batch; the engine takes its share of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import numpy as np

from mrl.batch import Batch, make_batch
from mrl.config.schema import DataConfig
from mrl.data.dataset import Example, SFTDataset
from mrl.errors import CheckpointError, DataError

NOTES_PER_BATCH = 5


def row_order(seed: int, epoch: int, rows: int, shuffle: bool = True) -> np.ndarray:
    """[rows] int64: the order of an epoch.

    A stable sort of Philox's raw output: NumPy keeps bit generators the same between versions, but not permutation().
    """
    if not shuffle:
        return np.arange(rows)
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(rows), kind="stable")


def steps_for_epochs(epochs: float, rows: int, global_batch_size: int) -> int:
    """Batches that cover `epochs` passes over the rows that fill them; the last one may reach into the next epoch."""
    return max(1, math.ceil(Fraction(str(epochs)) * rows / global_batch_size))


@dataclasses.dataclass(frozen=True)
class Progress:
    """A position in the stream (`position` rows of `epoch` are used up) and what was met on the way to it."""

    epoch: int = 0
    position: int = 0
    skipped: int = 0
    dropped: int = 0
    truncated: int = 0


@dataclasses.dataclass
class Report:
    """Rows skipped as bad, dropped as too long, and truncated; `notes` name some of those left out."""

    skipped: int = 0
    dropped: int = 0
    truncated: int = 0
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """As `BatchSource.counts`."""
        return {"skipped": self.skipped, "dropped": self.dropped, "truncated": self.truncated}

    def count(self, dataset: SFTDataset, row: int) -> Example | None:
        """Loads a row and counts what became of it; None where it is left out."""
        loaded = dataset.load(row)
        if isinstance(loaded, Example):
            self.truncated += loaded.truncated
            return loaded
        if loaded.outcome == "skipped":
            self.skipped += 1
        else:
            self.dropped += 1
        if len(self.notes) < NOTES_PER_BATCH:
            self.notes.append(f"{loaded.outcome}: {loaded.why}")
        return None

    def of_which_none_is_left(self, dataset: SFTDataset) -> DataError:
        return DataError(
            f"data.{dataset.part}: {dataset.path}: none of its {len(dataset)} rows can be used; {self.notes[0]}"
        )


def may_leave_out(config: DataConfig) -> bool:
    """Whether rows may be left out, so that fewer than all of them fill the batches."""
    return config.truncation == "drop" or config.on_bad_row == "skip"


def count_usable(dataset: SFTDataset) -> tuple[int, dict[str, int]]:
    """Rows that fill batches, and counts as `BatchSource.counts`: one pass that encodes every row, the same on every rank.

    Raises DataError as `SFTDataset.load` does, and where no row is left.
    """
    report = Report()
    usable = sum(report.count(dataset, row) is not None for row in range(len(dataset)))
    if not usable:
        raise report.of_which_none_is_left(dataset)
    return usable, report.counts


@dataclasses.dataclass(frozen=True)
class _Built:
    batch: Batch
    rows: list[int]
    progress: Progress
    notes: list[str]


class BatchSource:
    """An endless source of global mini-batches that can be saved and continued exactly.

    With `prefetch`, a thread makes one batch ahead. `state_dict`, `counts`, `rows` and `take_notes` speak of batches
    that `next` has returned, never of the one ahead.
    """

    def __init__(
        self, dataset: SFTDataset, *, global_batch_size: int, seed: int, shuffle: bool = True, prefetch: bool = True
    ) -> None:
        self.dataset = dataset
        self.global_batch_size, self.seed, self.shuffle = global_batch_size, seed, shuffle
        self.rows: list[int] = []  # row indices of the batch returned last; `dataset.where` names them
        self._fingerprint = dataset.fingerprint()
        self._progress = Progress()
        self._notes: list[str] = []
        self._order: tuple[int, np.ndarray] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mrl-data") if prefetch else None
        self._ahead: Future[_Built] | None = None

    def next(self) -> Batch:
        """The next `global_batch_size` usable rows, with denominators. Raises DataError as `SFTDataset.load` does."""
        ahead, self._ahead = self._ahead, None
        built = ahead.result() if ahead is not None else self._build(self._progress)
        self.rows, self._progress = built.rows, built.progress
        self._notes += built.notes
        if self._thread is not None:
            self._ahead = self._thread.submit(self._build, built.progress)
        return built.batch

    def peek(self) -> None:
        """Raises what `next` would raise, and changes nothing: the batch is kept for it."""
        if self._ahead is None:
            self._ahead = Future()
            self._ahead.set_result(self._build(self._progress))
        self._ahead.result()

    def next_error(self) -> DataError | None:
        """What `next` will raise of a batch that is being made already, for a checkpoint to be saved first; waits for it."""
        try:
            if self._ahead is not None:
                self._ahead.result()
        except DataError as error:
            return error
        return None

    @property
    def counts(self) -> dict[str, int]:
        """Rows skipped (bad), dropped (too long) and truncated since the start of the run, also before a resume."""
        return {name: getattr(self._progress, name) for name in ("skipped", "dropped", "truncated")}

    def take_notes(self) -> list[str]:
        """One line for each of the first few rows left out of each batch, since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def close(self) -> None:
        """Ends the thread; `next` may not be called again."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _build(self, start: Progress) -> _Built:
        """The batch that follows `start`: a pure function of it and of the settings."""
        report, examples, rows = Report(), [], []
        epoch, position, fruitless = start.epoch, start.position, 0
        while len(examples) < self.global_batch_size:
            row = int(self._epoch_order(epoch)[position])
            epoch, position = (epoch, position + 1) if position + 1 < len(self.dataset) else (epoch + 1, 0)
            example = report.count(self.dataset, row)
            if example is not None:
                examples.append(example)
                rows.append(row)
                fruitless = 0
                continue
            fruitless += 1
            if fruitless > len(self.dataset):
                raise report.of_which_none_is_left(self.dataset)
        progress = Progress(
            epoch, position, start.skipped + report.skipped, start.dropped + report.dropped,
            start.truncated + report.truncated,
        )  # fmt: skip
        return _Built(make_batch([e.ids for e in examples], [e.mask for e in examples]), rows, progress, report.notes)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        cached = self._order
        if cached is None or cached[0] != epoch:
            cached = self._order = (epoch, row_order(self.seed, epoch, len(self.dataset), self.shuffle))
        return cached[1]

    # ---------------------------------------------------------------------------------------------------- resume

    def state_dict(self) -> dict[str, Any]:
        """The position after the batch returned last, with what the position means: plain numbers, strings, lists."""
        return {
            "version": 1,
            **dataclasses.asdict(self._progress),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "data": self._fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues after the batch that was returned last when `state` was made.

        Raises CheckpointError where the position would mean other rows: the data, the seed or the shuffle changed.
        Files may have moved. The global batch size may differ: the position counts rows.
        """
        fields = [f.name for f in dataclasses.fields(Progress)]
        if state.get("version") != 1 or any(k not in state for k in (*fields, "seed", "shuffle", "data")):
            raise CheckpointError(
                f"the data position in the checkpoint has the fields {', '.join(sorted(state)) or 'none'}, "
                "not those of this version; resume with the version of mrl that saved it"
            )
        for name, now in (("seed", self.seed), ("data.shuffle", self.shuffle)):
            saved = state[name.removeprefix("data.")]
            if saved != now:
                raise CheckpointError(
                    f"{name}: is {now} and was {saved} when the checkpoint was saved, so the order of the rows would change; "
                    f"set it to {saved}, or start a new run in another output_dir"
                )
        if change := _data_change(state["data"], self._fingerprint):
            raise CheckpointError(
                f"data.{self.dataset.part}: {change}; the position in the checkpoint means other rows now: "
                "put the data back, or start a new run in another output_dir"
            )
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead = None
        self._progress = Progress(**{name: state[name] for name in fields})
        self.rows, self._notes = [], []


def _data_change(saved: list[dict[str, Any]], now: list[dict[str, Any]]) -> str | None:
    """What differs between two fingerprints in words, or None; names of files may differ."""
    if len(saved) != len(now):
        return f"has {len(now)} files and had {len(saved)} when the checkpoint was saved"
    for before, after in zip(saved, now, strict=True):
        for what in ("rows", "size", "hash"):
            if before[what] != after[what]:
                unit = {"rows": "rows", "size": "bytes", "hash": "as content hash"}[what]
                return f"{after['name']} has {after[what]} {unit} and had {before[what]} when the checkpoint was saved"
    return None


def eval_batches(dataset: SFTDataset, global_batch_size: int, report: Report | None = None) -> Iterator[Batch]:
    """All usable rows once, in their order; the last batch may be smaller. `report` is filled on the way."""
    report = report if report is not None else Report()
    examples: list[Example] = []
    any_batch = False
    for row in range(len(dataset)):
        example = report.count(dataset, row)
        if example is not None:
            examples.append(example)
        if examples and (len(examples) == global_batch_size or row == len(dataset) - 1):
            yield make_batch([e.ids for e in examples], [e.mask for e in examples])
            any_batch, examples = True, []
    if not any_batch:
        raise report.of_which_none_is_left(dataset)
