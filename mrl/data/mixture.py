"""Rows of several sources, mixed by their weights: the source of the next row, and the row in it.

Every source has an order of its own, epoch after epoch, a function of (seed, its name, epoch). The next row comes from
the source that is furthest behind its share. With `W` the sum of weights, source `i` is due `w_i / W` of all that was
given. It is behind by

    due_i = w_i / W * (given_1 + ... + given_n) - given_i

The source with the largest `due` gives the next row that can be used, the first of equals. So no source is ever a whole
row ahead of its share (`due_i > -1`); shares of tokens are ahead by no more than the last row. A checkpoint holds these
integers and the position in each source. So the mixture is a function of the seed and the number of rows taken.

A source whose `epochs` are over gives no more. Shares of the others then start from zero, as they do if a resumed run
has other weights or sources.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, TypeVar

import numpy as np

from mrl.config.ppo import PromptsConfig
from mrl.config.sources import Share, Source
from mrl.data.dataset import LoadedRow, RejectedRow, RowDataset
from mrl.data.encode import Encoder
from mrl.data.splits import NamedFiles, check_apart, check_splits
from mrl.data.streamed import START, Cursor, Mark, Order
from mrl.errors import DataError, UserError, show

T = TypeVar("T", bound=LoadedRow)
D = TypeVar("D", bound=Any)

ROW_KEYS = ("columns", "turns", "chat_template", "format", "loss_on", "system", "prompt_end", "split", "teacher")
"""Keys of a source that say what its rows become."""
READ_KEYS = ("stream", "shuffle_buffer")
"""Keys of a source that say how its rows are read."""


def section_of_source(data: D, source: Source, part: Literal["train", "eval"]) -> D:
    """Returns a section `data` on the rows of one source alone."""
    own = {name: getattr(source, name) for name in (*ROW_KEYS, *READ_KEYS) if getattr(source, name, None) is not None}
    return dataclasses.replace(data, **{part: source.path}, **own)


def train_rows(data: Any, make: Callable[[Any], RowDataset[T]]) -> RowDataset[T]:
    """Returns the rows of data.train. make: opens those of a section `data` with one path."""
    if isinstance(data.train, str):
        return make(data)
    sources = enumerate(data.train)
    return MixedDataset(data, [_made(make, data, source, "train", f"data.train[{i}]") for i, source in sources])


def eval_rows(data: Any, make: Callable[[Any], RowDataset[T]]) -> dict[str, RowDataset[T]]:
    """Returns the rows of data.eval by name, "" if it is one path; {} if it is null. make: as `train_rows`."""
    if data.eval is None:
        return {}
    if isinstance(data.eval, str):
        return {"": make(data)}
    return {name: _made(make, data, source, "eval", f"data.eval.{name}") for name, source in data.eval.items()}


def notes_of_rows(train: RowDataset[Any] | None, evaluation: Mapping[str, RowDataset[Any]]) -> list[str]:
    """Returns lines on files that both data.train and data.eval name, and on the first rows. Raises
    DataError where a folder or a glob brought a file into both."""
    of_train = [] if train is None else train.named_files
    of_eval = [
        dataclasses.replace(one, key=f"data.eval.{name}".rstrip("."))
        for name, rows in evaluation.items()
        for one in rows.named_files
    ]
    noted = [line for rows in (train, *evaluation.values()) if rows is not None for line in rows.notes()]
    return [*check_apart(of_train, of_eval), *noted]


def _made(
    make: Callable[[Any], RowDataset[T]], data: Any, source: Source, part: Literal["train", "eval"], at: str
) -> RowDataset[T]:
    """Returns the rows of a source. at: its key, named in errors."""
    try:
        return make(section_of_source(data, source, part))
    except DataError as error:
        raise type(error)(at, why=str(error)) from error


class MixedDataset(RowDataset[T]):
    """The rows of several sources, one source after the other; `RowStream` mixes them.

    sources: as `data.train` lists them, in its order.
    """

    config: Any  # a DataConfig or PreferenceDataConfig

    def __init__(self, data: Any, sources: Sequence[RowDataset[T]]) -> None:
        self.config, self.part, self.vocab_size = data, "train", sources[0].vocab_size
        self.shares: tuple[Share, ...] = data.train
        self.sources = list(sources)
        for share, source in zip(self.shares, self.sources, strict=True):
            source.end_after(share.epochs)
        self.starts = [0, *itertools.accumulate(source.indices for source in sources)]  # above 2**63 where streamed
        self.path = ", ".join(share.title for share in self.shares)
        check_splits(self.named_files)

    def __len__(self) -> int:
        assert not self.is_streamed, "the number of rows that are streamed is not known"
        return self.starts[-1]

    @property
    def is_streamed(self) -> bool:
        """Whether those of a source are."""
        return any(source.is_streamed for source in self.sources)

    def close(self) -> None:
        for source in self.sources:
            source.close()

    def leave_out(self, why: str) -> None:
        self._streamed_or_first().leave_out(why)

    def agree(self, error: UserError | None) -> None:
        self._streamed_or_first().agree(error)

    def _streamed_or_first(self) -> RowDataset[T]:
        """Returns a streamed source if there is one, since it speaks to the other ranks; else the first."""
        return next((source for source in self.sources if source.is_streamed), self.sources[0])

    def find(self, index: int) -> tuple[int, int]:
        """Returns the number of the source that row `index` is of, and its index there."""
        number = bisect.bisect_right(self.starts, index) - 1
        return number, index - self.starts[number]

    def where(self, index: int) -> str:
        number, row = self.find(index)
        return self.sources[number].where(row)

    def encoders(self) -> list[Encoder]:
        return [encoder for source in self.sources for encoder in source.encoders()]

    @property
    def named_files(self) -> list[NamedFiles]:
        keyed = enumerate(one for source in self.sources for one in source.named_files)
        return [dataclasses.replace(one, key=f"data.train[{i}]") for i, one in keyed]

    def load(self, index: int) -> T | RejectedRow:
        number, row = self.find(index)
        return self.sources[number].load(row)

    def notes(self) -> list[str]:
        return [line for source in self.sources for line in source.notes()]

    def read_first(self) -> None:
        for source in self.sources:
            source.read_first()

    def first_rows(self) -> list[tuple[dict[str, Any], str]]:
        return [source.first_row() for source in self.sources]

    def first_row(self) -> tuple[dict[str, Any], str]:
        return self.sources[0].first_row()


@dataclasses.dataclass(frozen=True)
class SourceProgress:
    """The rows and tokens that a source has given. `position` rows of `epoch` are used up."""

    epoch: int = 0
    position: int = 0
    rows: int = 0
    tokens: int = 0
    given: int = 0  # rows or tokens, since shares count
    mark: Mark = START  # of a source that is streamed: where the block of its next row begins


class OrderedRows:
    """Gives the rows of a data set one after the other, each epoch in an order of its own."""

    def __init__(
        self, dataset: RowDataset[Any], epoch_order: Callable[[int, int], np.ndarray], streamed_order: Order
    ) -> None:
        """epoch_order: (epoch, number of rows) -> row indices. streamed_order: the same of streamed rows."""
        self.dataset, self._epoch_order, self._streamed_order = dataset, epoch_order, streamed_order
        self._cached: tuple[int, np.ndarray] | None = None

    def take(self, at: Cursor) -> tuple[int, Cursor]:
        """Returns the index of the row at a position, and the next position."""
        if self.dataset.is_streamed:
            return self.dataset.take(at, self._streamed_order)
        cached = self._cached
        if cached is None or cached[0] != at.epoch:
            cached = self._cached = (at.epoch, self._epoch_order(at.epoch, len(self.dataset)))
        is_last = at.position + 1 == len(self.dataset)
        after = Cursor(at.epoch + 1) if is_last else Cursor(at.epoch, at.position + 1)
        return int(cached[1][at.position]), after


class Mixer:
    """Chooses rows of a `MixedDataset`; see the module. `reads`: how far each source has been read."""

    def __init__(self, dataset: MixedDataset[Any], order: Callable[[str, int, int], np.ndarray]) -> None:
        """Reads weights and epochs. order: (name, epoch, number of rows) -> row indices of a source."""
        self.dataset = dataset
        self.by_tokens = dataset.config.mix_by == "tokens"
        weights = [
            Fraction(len(source)) if share.weight is None else Fraction(str(share.weight))
            for share, source in zip(dataset.shares, dataset.sources, strict=True)
        ]
        scale = math.lcm(*(weight.denominator for weight in weights))
        self.weights = [int(weight * scale) for weight in weights]
        self.last: list[int | None] = []
        self._rows: list[OrderedRows] = []

        def order_of_part(name: str, what: str, epoch: int, rows: int) -> np.ndarray:
            return order(f"{name}/{what}", epoch, rows)

        for share, source in zip(dataset.shares, dataset.sources, strict=True):
            last = None
            if share.epochs is not None and not source.is_streamed:
                last = math.floor(Fraction(str(share.epochs)) * len(source))
            if last == 0:
                why = f"is {share.epochs:g}, which of its {len(source)} rows is none"
                raise DataError(f"data.train, source {share.title}, epochs", why=why, fix="give more, or leave it out")
            self.last.append(last)
            of_epoch = functools.partial(order, share.title)
            of_part = functools.partial(order_of_part, share.title)
            self._rows.append(OrderedRows(source, of_epoch, of_part))

    def is_over(self, number: int, read: SourceProgress) -> bool:
        """Returns whether the passes that a source may make are made."""
        if self.dataset.sources[number].is_streamed:
            epochs = self.dataset.shares[number].epochs
            return epochs is not None and read.epoch >= epochs
        last = self.last[number]
        return last is not None and read.epoch * len(self.dataset.sources[number]) + read.position >= last

    def all_sources_over(self, reads: Sequence[SourceProgress]) -> bool:
        """Returns whether no source gives a row any more."""
        return all(self.is_over(number, read) for number, read in enumerate(reads))

    def choose(self, reads: Sequence[SourceProgress]) -> int:
        """Returns the number of the source that the next row is of. Raises DataError where all are over."""
        open_ = [i for i, read in enumerate(reads) if not self.is_over(i, read)]
        if not open_:
            raise DataError(
                "data.train", why="every source has given the passes over its rows that its epochs allow",
                fix="lower train.steps or train.epochs, or raise epochs of a source",
            )  # fmt: skip
        given, weight = sum(reads[i].given for i in open_), sum(self.weights[i] for i in open_)
        return max(open_, key=lambda i: (self.weights[i] * given - weight * reads[i].given, -i))

    def row(self, number: int, read: SourceProgress) -> tuple[int, Cursor]:
        """Returns the index of the next row of source `number` among the rows of all sources, and the position after it
        in the source."""
        index, after = self._rows[number].take(Cursor(read.epoch, read.position, read.mark))
        return self.dataset.starts[number] + index, after

    def record_read(self, reads: list[SourceProgress], number: int, cursor: Cursor, item: Any | None) -> None:
        """Counts a row of source `number` in `reads`. cursor: the position after it. item: the row in tokens;
        None if left out."""
        read = reads[number]
        rows, tokens = 0, 0
        if item is not None:
            rows, tokens = 1, self.dataset.sources[number].tokens_of(item)
        reads[number] = SourceProgress(
            cursor.epoch, cursor.position, read.rows + rows, read.tokens + tokens,
            read.given + (tokens if self.by_tokens else rows), cursor.mark,
        )  # fmt: skip
        if self.is_over(number, reads[number]):
            reads[:] = [dataclasses.replace(one, given=0) for one in reads]

    def settings(self, number: int) -> dict[str, Any]:
        """Returns the settings by which rows of a source become tokens, as plain data."""
        source = self.dataset.sources[number]
        config = source.config
        settings = {name: getattr(config, name) for name in ROW_KEYS if hasattr(config, name)}
        if not isinstance(config, PromptsConfig):  # null where rows are not streamed, as in states of older versions
            settings |= {"stream": True if source.is_streamed else None}
            settings |= {"shuffle_buffer": config.resolved_shuffle_buffer if source.is_streamed else None}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}


def mixture_changes(
    saved: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]
) -> list[str]:  # fmt: skip
    """Returns the changes in a resumed run's mixture in words, from the entries of `sources` of two states."""
    before = {entry["name"]: entry for entry in saved}
    names = {entry["name"] for entry in now}
    words = [
        f"{entry['name']} is new and begins with its first row"
        for entry in now if entry["name"] not in before
    ] + [
        f"{name} is no longer there, of which {entry['rows']:,} rows were used"
        for name, entry in before.items() if name not in names
    ]  # fmt: skip
    for entry in now:
        old = before.get(entry["name"], entry)
        for what in ("weight", "epochs"):
            if old[what] != entry[what]:
                words.append(f"{what} of {entry['name']} was {show(old[what])} and is {show(entry[what])}")
    return words
