"""Says the first lines of a run: its engines' choices, its models, its length, which it finds here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from mrl.config.checks import check_batch, parallel_dims
from mrl.data.batches import steps_for_epochs
from mrl.data.dataset import RowDataset
from mrl.data.mixture import MixedDataset
from mrl.data.stream import count_usable, may_leave_out, usable_of_mixture
from mrl.engine.base import BaseEngine
from mrl.engine.lora.folder import adapters
from mrl.errors import ConfigError
from mrl.trainers.console import Console
from mrl.words import pluralize


def say_choices(console: Console, engines: Mapping[str, BaseEngine]) -> None:
    """Says what engines chose. engines: by role, or "" for the only one."""
    for role, engine in engines.items():
        for note in engine.notes:
            console.say(f"{role}: {note}" if role else note)


def say_length(console: Console, *, steps: int, batch: int, noun: str, rows: int | None, per_epoch: float) -> None:
    """Says how long a run is.

    batch: rows of a step. noun: their name. rows: of data.train, None of a stream. per_epoch: steps of one pass over
    them.
    """
    length = f"{pluralize(steps, 'step')} of {pluralize(batch, noun)}"
    if rows is None:
        console.say(f"data.train: a stream; {length}")
        return
    epochs = pluralize(float(f"{steps / per_epoch:.3g}"), "epoch")
    console.say(f"data.train: {pluralize(rows, 'row')}; {length}, which are {epochs}")


def say_model(console: Console, role: str, engine: BaseEngine) -> None:
    """Says what of a role's model trains, and how the model is laid out. role: as keys name it."""
    config, backend = engine.config, engine.config.engine
    what = "all parameters train" if config.optimizer is not None else "is frozen"
    if config.model.lora is not None:
        shapes = adapters(config.model.path, config.model.lora, config.head).values()
        trained = sum(math.prod(shape.a_shape) + math.prod(shape.b_shape) for shape in shapes)
        what = f"{trained:,} parameters of adapters on {len(shapes)} weights train"
    dims = parallel_dims(backend.parallel, engine.world_size)
    where = f"{dims.describe()} on {pluralize(engine.world_size, 'process', 'processes')} ({engine.device.type})"
    console.say(f"{role}: {what}; {backend.backend}, {where}, {config.model.dtype}")


def length_of(
    config: Any, train_set: RowDataset[Any], console: Console, *, rows: int, check: Callable[[int, str], None],
    each: int = 1,
) -> int:  # fmt: skip
    """Returns steps of the run: train.steps; or as many as give train.epochs times the rows of all sources. If neither
    is set and every source has epochs, it is as many as their rows fill.

    rows: of a batch. each: steps on a batch. check: raises ConfigError if the schedules do not fit a length, in words.
    Usable rows are counted first if some may be left out and the length depends on them: a pass that every rank makes,
    and a run that is resumed. Raises ConfigError where the sources give fewer rows than the length takes.
    """
    train = config.train
    if train_set.is_streamed:
        return train.steps
    check_batch(train.global_batch_size, rows, len(train_set))
    mixed = train_set if isinstance(train_set, MixedDataset) else None
    bounded = mixed is not None and all(share.epochs is not None for share in mixed.shares)
    if train.steps is not None and not bounded:
        return train.steps
    usable, most, counts = len(train_set), None, may_leave_out(config.data)
    if counts:
        size = pluralize(len(train_set), "row")
        console.say(f"data.train: counting which of its {size} can be used, for the length of the run")
    if mixed is not None:
        usable_of = usable_of_mixture(mixed, config.seed, shuffle=config.data.shuffle)
        usable = sum(rows_of for rows_of, _ in usable_of)
        most = sum(bound for _, bound in usable_of if bound is not None) if bounded else None
    elif counts:
        usable, _ = count_usable(train_set)
    if train.steps is not None:
        steps, length = train.steps, f"train.steps {train.steps}"
    elif train.epochs is None and most is not None:
        steps = most // rows * each
        length = f"the {pluralize(steps, 'step')} that the epochs of the sources fill"
    else:
        epochs = 1.0 if train.epochs is None else train.epochs
        steps = steps_for_epochs(epochs, usable, rows) * each
        length = f"the {pluralize(steps, 'step')} of {pluralize(epochs, 'epoch')}"
    if most is not None:
        _check_sources(config, most=most, needed=-(-steps // each) * rows, rows=rows, each=each)
    if train.steps is None:
        check(steps, length)
        if counts or mixed is not None:
            console.say(f"data.train: {usable:,} rows can be used, which makes {length}")
    return steps


def _check_sources(config: Any, *, most: int, needed: int, rows: int, each: int) -> None:
    """Raises ConfigError if a run takes more rows than its sources have. needed: rows that it takes."""
    train, have = config.train, f"and the sources of data.train have {most:,} within their epochs"
    if most < rows:
        size = train.global_batch_size
        less = f"give at most {most * size // rows}, or " if most else ""
        fix = f"{less}raise epochs of a source"
        raise ConfigError("train.global_batch_size", size, f"takes {rows:,} rows, {have}", fix)
    if needed > most:
        key, value = "train.epochs", float(train.epochs or 1)
        if train.steps is not None:
            key, value = "train.steps", train.steps
        fix = f"give at most {most // rows * each} steps, or raise epochs of a source"
        raise ConfigError(key, value, f"takes {needed:,} rows, {have}", fix)
