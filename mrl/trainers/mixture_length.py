"""Finds the length of a run on a mixture of sources. A source may have a number of passes."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from mrl.data.batches import steps_for_epochs
from mrl.data.mixture import MixedDataset
from mrl.data.stream import may_leave_out, usable_of_mixture
from mrl.errors import ConfigError
from mrl.trainers.console import Console
from mrl.words import pluralize


def length_of_mixture(
    config: Any, train_set: MixedDataset[Any], console: Console, *, rows: int, check: Callable[[int, str], None],
    each: int = 1,
) -> int:  # fmt: skip
    """Returns steps of the run: train.steps; or as many as give train.epochs times the rows of all sources. If neither
    is set and every source has epochs, it is as many as their rows fill.

    rows: of a batch. each: steps on a batch. check: raises ConfigError if the schedules do not fit a length, in words.
    Usable rows are counted first if some may be left out and the length depends on them. Raises ConfigError where the
    sources give fewer rows than the length takes.
    """
    train = config.train
    bounded = all(share.epochs is not None for share in train_set.shares)
    if train.steps is not None and not bounded:
        return train.steps
    if may_leave_out(config.data):
        console.say(f"data.train: counting which of its {len(train_set)} rows can be used, for the length of the run")
    usable_of = usable_of_mixture(train_set, config.seed, shuffle=config.data.shuffle)
    most = sum(bound for _, bound in usable_of if bound is not None) if bounded else None
    if train.steps is not None:
        steps, length = train.steps, f"train.steps {train.steps}"
    elif train.epochs is None and most is not None:
        steps = most // rows * each
        length = f"the {pluralize(steps, 'step')} that the epochs of the sources fill"
    else:
        epochs = 1.0 if train.epochs is None else train.epochs
        steps = steps_for_epochs(epochs, sum(usable for usable, _ in usable_of), rows) * each
        length = f"the {pluralize(steps, 'step')} of {pluralize(epochs, 'epoch')}"
    needed = -(-steps // each) * rows
    if most is not None and most < rows:
        size = train.global_batch_size
        why = f"takes {rows:,} rows, and the sources of data.train have {most:,} within their epochs"
        less = f"give at most {most * size // rows}, or " if most else ""
        raise ConfigError("train.global_batch_size", size, why, f"{less}raise epochs of a source")
    if most is not None and needed > most:
        key = "train.steps" if train.steps is not None else "train.epochs"
        value = train.steps if train.steps is not None else Fraction(str(train.epochs or 1))
        raise ConfigError(
            key, float(value) if key == "train.epochs" else value,
            f"takes {needed:,} rows, and the sources of data.train have {most:,} within their epochs",
            f"give at most {most // rows * each} steps, or raise epochs of a source",
        )  # fmt: skip
    if train.steps is None:
        check(steps, length)
        console.say(f"data.train: {sum(usable for usable, _ in usable_of):,} rows can be used, which makes {length}")
    return steps
