"""Says the first lines of a run: its engines' choices, its models, its length."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mrl.config.checks import parallel_dims
from mrl.config.schema import RoleConfig
from mrl.engine.base import BaseEngine
from mrl.engine.lora.folder import adapters
from mrl.trainers.console import Console
from mrl.weights.families import family_of
from mrl.weights.hf_config import read_hf_config
from mrl.weights.mtp import num_mtp_layers
from mrl.weights.rules import expected_hf_names
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
    """Says how many parameters of a role's model train, and how the model is laid out. role: as keys name it."""
    config = engine.config
    console.say(f"{role}: {_parameters(config)}; {_layout(engine)}, {config.model.dtype}")


def _parameters(config: RoleConfig) -> str:
    hf = read_hf_config(config.model.path)
    of_model = ""
    if (family := family_of(hf["model_type"])) is not None:  # another one's shapes are known to transformers alone
        mtp = num_mtp_layers(hf) if config.mtp is not None else 0
        shapes_of_model = expected_hf_names(family, hf, head=config.head, mtp=mtp).values()
        of_model = f"{sum(map(math.prod, shapes_of_model)):,} "
    if config.model.lora is not None:
        shapes = adapters(config.model.path, config.model.lora, config.head).values()
        trained = sum(math.prod(shape.a_shape) + math.prod(shape.b_shape) for shape in shapes)
        of = f"adapters of rank {config.model.lora.rank} on {len(shapes)} weights"
        return f"{of}; their {trained:,} parameters train, and the model's {of_model}do not"
    return f"{of_model}parameters {'train' if config.optimizer is not None else 'are frozen'}"


def _layout(engine: BaseEngine) -> str:
    of = engine.config.engine
    dims = parallel_dims(of.parallel, engine.world_size)
    where = pluralize(engine.world_size, "process", "processes")
    return f"{of.backend}, {dims.describe()} on {where} ({engine.device.type})"
