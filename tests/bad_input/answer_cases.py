"""Rows and sources of `mrl dpo`, `mrl rm`, and of `mrl sft` with a teacher, that cannot be trained on. The rows that the
modules of mrl/data refuse, one by one, are in tests/data."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

from safetensors.torch import load_file, save_file

from tests.bad_input.mistakes import Case, Workspace, chat, set_model

PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
SINGLE = {"prompt": "1+1=", "completion": "2", "label": True}
GRADED = {"prompt": "1+1=", "completion": "2", "score": 1.0}
GOOD = chat("1+1=", "2")
KTO = ("loss.name=kto",)


def row(good: dict[str, Any], **changes: Any) -> Callable[[Workspace], None]:
    """An edit that makes rows like `good`, with changes in line 3; a field of None is null there."""
    return lambda workspace: workspace.write_rows([good, good, {**good, **changes}, good])


def rows(*all_of_them: Any, name: str = "rows.jsonl") -> Callable[[Workspace], None]:
    return lambda workspace: workspace.write_rows(all_of_them, name)


def both(*edits: Callable[[Workspace], None]) -> Callable[[Workspace], None]:
    def edit(workspace: Workspace) -> None:
        for one in edits:
            one(workspace)

    return edit


def other_without_a_weight(workspace: Workspace) -> None:
    """Adds the folder `other`, a copy of the model of which a tensor is missing."""
    shutil.copytree(workspace.root / "model", workspace.root / "other")
    file = workspace.root / "other" / "model.safetensors"
    save_file({name: of for name, of in load_file(file).items() if name != "model.norm.weight"}, file)


MISSING = ("other: tensors do not fit config.json: 1 missing (model.norm.weight)",)

DPO = [
    Case("nothing weighs", "data", ("all 4 rows of a batch have weight 0",), edit=rows(*[{**PAIR, "weight": 0}] * 4)),
    Case("one row to evaluate kto on", "data.eval", ("eval.jsonl: has one row", "give two rows"), (*KTO, "data.eval=eval.jsonl"), both(row(SINGLE, label=False), rows(SINGLE, name="eval.jsonl"))),
    Case("nothing to evaluate on weighs", "data.eval", ("eval.jsonl: all of its rows that can be used have weight 0", "another weight"), ("data.eval=eval.jsonl",), both(rows(*[PAIR] * 4), rows(*[{**PAIR, "weight": 0}] * 4, name="eval.jsonl"))),
    Case("reference of other weights", "reference.model.path", MISSING, ("reference.model.path=other",), both(rows(*[PAIR] * 4), other_without_a_weight)),
]  # fmt: skip

RM = [
    Case("eval of another form", "data.eval", ("eval.jsonl", "and loss.name bradley_terry is of others"), ("data.eval=eval.jsonl",), both(rows(*[PAIR] * 4), rows(GRADED, name="eval.jsonl"))),
    Case("adapters without a classifier", "model.lora", ("'olmoe' has no sequence classifier", "set it to null"), ("model.lora={rank: 4}",), both(rows(*[PAIR] * 4), set_model(model_type="olmoe", num_experts=6, num_experts_per_tok=2))),
]  # fmt: skip

TEACHER = ("teacher={model: {path: model}, weight: 0.5}",)
MATH = ("teacher={model: {path: model}, weight: 0.5, others: {math: {model: {path: model}}}}",)
HALVES = "data.train=[{path: rows.jsonl, epochs: 0.5}, {path: more.jsonl, epochs: 0.25}]"

SFT = [
    Case("teacher that no row may name", "rows.jsonl:3", ("teacher is 'math', which teacher.others has not", "teacher_unused"), TEACHER, row(GOOD, teacher="math")),
    Case("teacher of other weights", "teacher.others.math.model.path", MISSING, (MATH[0].replace("{math: {model: {path: model}}}", "{math: {model: {path: other}}}"),), other_without_a_weight),
    Case("epochs that fill no batch", "train.global_batch_size", ("value 4 takes 4 rows", "have 3 within", "give at most 3, or raise epochs"), (HALVES, "train.steps=null"), rows(*[GOOD] * 4, name="more.jsonl")),
]  # fmt: skip
