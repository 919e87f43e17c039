"""Says the first lines of a run: its engines' choices, its models, its length."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mrl.config.checks import parallel_dims
from mrl.engine.base import BaseEngine
from mrl.engine.lora.folder import adapters
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
