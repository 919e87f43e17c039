"""Global mini-batches out of an endless stream of rows (mrl/data/stream.py).

A batch takes the next `global_batch_size` usable rows of the stream. At the end of an epoch it goes on with the next
one: no row is lost and every batch is full. Every rank builds the same global batch; the engine takes its share of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from fractions import Fraction
from typing import Any

import torch

from mrl.algorithms.distill import TEACHER_OF
from mrl.batch import Batch, make_batch
from mrl.data.dataset import Example, RowDataset, T
from mrl.data.stream import Progress, Report, RowStream, TakenRows, usable_rows
from mrl.errors import DataError


def steps_for_epochs(epochs: float, rows: int, global_batch_size: int) -> int:
    """Returns batches for `epochs` passes over the rows; the last one may reach into the next epoch."""
    return max(1, math.ceil(Fraction(str(epochs)) * rows / global_batch_size))


def batch_of(examples: Sequence[Example]) -> Batch:
    """Returns the global mini-batch of some rows."""
    inputs = [e.multi_modal_inputs for e in examples]
    teachers = torch.tensor([e.teacher for e in examples])
    batch = make_batch(
        [e.ids for e in examples], [e.mask for e in examples], multi_modal_inputs=inputs,
        sequence_fields={TEACHER_OF: teachers} if teachers.any() else {},
    )  # fmt: skip
    if not batch.denominators["tokens"]:
        why = f"all {len(examples)} rows of a batch have weight 0, so there is nothing to divide by"
        raise DataError("data", why=why, fix="leave out rows of weight 0, or raise train.global_batch_size")
    return batch


class BatchSource(RowStream[T]):
    """An endless source of global mini-batches that can be saved and continued exactly.

    With `prefetch`, a thread makes one batch ahead. `state_dict`, `counts`, `rows` and `take_notes` speak of batches
    that `next` has returned, never of the one ahead.
    """

    def __init__(
        self, dataset: RowDataset[T], *, global_batch_size: int, seed: int, shuffle: bool = True, prefetch: bool = True,
        batch_of: Callable[[Sequence[Any]], Batch] = batch_of,
    ) -> None:  # fmt: skip
        """Starts the stream. batch_of: makes the global mini-batch of some rows."""
        super().__init__(dataset, seed=seed, shuffle=shuffle)
        self.global_batch_size, self.batch_of = global_batch_size, batch_of
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mrl-data") if prefetch else None
        self._ahead: Future[tuple[Batch, TakenRows[T]]] | None = None

    def next(self) -> Batch:
        """Returns the next `global_batch_size` usable rows, with denominators. DataError: as `RowDataset.load`."""
        ahead, self._ahead = self._ahead, None
        batch, taken = ahead.result() if ahead is not None else self._build(self._progress)
        self._moved(taken)
        if self._thread is not None:
            self._ahead = self._thread.submit(self._build, taken.progress)
        return batch

    def prefetch(self) -> None:
        """Raises what `next` would raise, and changes nothing: the batch is kept for it."""
        if self._ahead is None:
            self._ahead = Future()
            self._ahead.set_result(self._build(self._progress))
        self._ahead.result()

    def next_error(self, stops: Callable[[], bool] = lambda: False) -> DataError | None:
        """Returns the error of the coming `next`, so that a checkpoint is saved before.

        It waits for the batch that is being made already. A source that does not answer may take minutes, so it stops
        waiting when the run stops.
        """
        while self._ahead is not None and not stops():
            if self._ahead in wait([self._ahead], timeout=0.2).done:
                error = self._ahead.exception()
                if error is not None and not isinstance(error, DataError):
                    raise error
                return error
        return None

    def close(self) -> None:
        """Ends the thread; `next` may not be called again."""
        self.dataset.close()
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead = None

    def _build(self, start: Progress) -> tuple[Batch, TakenRows[T]]:
        def build() -> tuple[Batch, TakenRows[T]]:
            taken = self._after(start, self.global_batch_size)
            return self.batch_of(taken.items), taken

        return self.dataset.agree_on(build)


def eval_batches(dataset: RowDataset[Example], global_batch_size: int, report: Report | None = None) -> Iterator[Batch]:
    """Yields all usable rows once, in their order, as `in_order` does. `report` is filled on the way."""
    for _, rows in in_order(dataset, global_batch_size, report, weighs=lambda row: any(row.mask)):
        yield batch_of(rows)


def in_order(
    dataset: RowDataset[T], rows_at_once: int, report: Report | None = None, *,
    weighs: Callable[[T], Any] = lambda row: True, least: int = 1,
) -> Iterator[tuple[list[int], list[T]]]:  # fmt: skip
    """Yields all usable rows once, in their order, with their indices: `rows_at_once`, the last time perhaps fewer.

    weighs: whether a row counts in the denominator of a batch. least: rows of a batch. Too few rows are yielded with
    those before or after them, and so are rows that all weigh nothing. Too few are yielded alone only if there are no
    others. Raises DataError if no row can be used, or none weighs.
    """
    report = report if report is not None else Report()
    held: list[tuple[int, T]] = []  # a whole batch, until it is known that what follows makes one too
    rows: list[tuple[int, T]] = []
    makes_batch = lambda: len(rows) >= least and any(weighs(one) for _, one in rows)  # noqa: E731
    for row in usable_rows(dataset, report):
        rows.append(row)
        if len(rows) >= rows_at_once and makes_batch():
            if held:
                yield [index for index, _ in held], [one for _, one in held]
            held, rows = rows, []
    if rows and not held and not any(weighs(one) for _, one in rows):
        why = f"{dataset.path}: all of its rows that can be used have weight 0, so there is nothing to divide by"
        raise DataError(f"data.{dataset.part}", why=why, fix="give one of them another weight")
    parts = [held, rows] if makes_batch() else [held + rows]
    for part in parts:
        if part:
            yield [index for index, _ in part], [one for _, one in part]
