"""Rows of the tables of verl, NeMo-RL and TRL: a key of another trainer, and ours for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Row:
    """One key of another trainer."""

    theirs: str
    ours: tuple[str, ...] = ()  # () where nothing here stands for it; `actor.` is put before it where ours is a role's
    note: str = ""  # the change of unit or meaning
    values: Mapping[Any, Any] = dataclasses.field(default_factory=dict)
    """Theirs -> ours, "*" for any other: None where nothing needs to be written, KeyError where it cannot be told, ...
    where the value is kept. Without entries it is kept."""
    times: str = ""  # their key of a number that the value is multiplied with, as prompts are with samples
    when: str = ""  # their key that has to be true, or, after `not `, false, for this one to mean anything
    default: Any = None  # theirs where the file has none, written out where ours differs
    of: tuple[str, ...] = ()  # commands of ours that it is for; () for all


@dataclasses.dataclass(frozen=True)
class Trainer:
    name: str
    source: str  # what was read for it, with the version
    sections: tuple[str, ...]  # top-level keys that only its configs have
    begins: tuple[str, ...]  # beginnings of dotted keys in sections that ours have too, which only its configs have
    rows: tuple[Row, ...]


def row(theirs: str, ours: str = "", note: str = "", **more: Any) -> Row:
    return Row(theirs, tuple(ours.split()), note, **more)


def rows_with(rows: Iterable[Row], **more: Any) -> list[Row]:
    """Returns rows that have something more in common, as their `of` or `when`."""
    return [dataclasses.replace(one, **more) for one in rows]


def same_values(values: str) -> dict[str, str]:
    """Returns the `values` of a row whose names both have."""
    return {value: value for value in values.split()}


def unsupported_rows(prefix: str, names: str, note: str = "") -> list[Row]:
    """Returns rows of keys that nothing here stands for."""
    return [Row(f"{prefix}{name}", note=note) for name in names.split()]


INHERITED = "it names files whose keys this one has, too; translate the whole config"
PROMPTS = "counts prompts there; ours counts sequences, so multiply by the samples of a prompt"
ROLLOUTS = "counts rollouts there; optimizer steps here"
ROW = "counts rows in both"
SHARE = "a share of the run there; steps here"
MICRO = "sequences of a micro-batch on each device"
TOKENS = "tokens of a micro-batch on each device"
TOKENS_OF_CP = f"{TOKENS} there; ours counts before cp splits, so multiply by cp"
ONE_SIZE = "here one size for both"
JINJA = "a Jinja file here"
KWARGS = "put chat_template_kwargs into each row"
FUNCTION = "{function: path.py:name} here"

BY_HAND = {"*": KeyError}
NEEDLESS = {"*": None}
FREQ = {-1: None, "*": ...}
OFF = {0: None, -1: None, "*": ...}
RECOMPUTE = {True: "full", False: "none"}
DTYPE = same_values("float32 bfloat16") | {"fp32": "float32", "bf16": "bfloat16"}

PPO, SFT, NOT_PPO = ("ppo",), ("sft",), ("sft", "dpo", "rm")
PARALLEL = (
    ("tensor_model_parallel_size", "tp"), ("pipeline_model_parallel_size", "pp"), ("context_parallel_size", "cp"),
    ("expert_model_parallel_size", "ep"), ("expert_tensor_parallel_size", "etp"),
    ("virtual_pipeline_model_parallel_size", "vpp"), ("sequence_parallel", "sp"),
)  # fmt: skip


def offload(*what: str) -> dict[bool, Any]:
    """Returns the `values` of a switch that ours has in the list engine.offload."""
    return {False: None, True: list(what)}
