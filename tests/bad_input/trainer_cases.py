"""What a trainer has to look at: model folders, data files and rows, checkpoints, and what they are used with.

The rows that the modules of mrl/data refuse, one by one, are in tests/data.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.bad_input.mistakes import Case, Workspace, chat, set_model

# Model folders: files that are not there, broken, or do not belong together.
UP = "model.layers.0.mlp.up_proj.weight"


def fields(**changes: Any) -> Callable[[Workspace], None]:
    """An edit of config.json."""

    def edit(workspace: Workspace) -> None:
        content = json.loads((workspace.root / "model/config.json").read_text())
        workspace.write("model/config.json", json.dumps(content | changes))

    return edit


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Workspace], None]:
    """An edit of the weights."""

    def edit(workspace: Workspace) -> None:
        path = workspace.root / "model/model.safetensors"
        content = {name: tensor.clone() for name, tensor in load_file(path).items()}
        change(content)
        save_file(content, path, metadata={"format": "pt"})

    return edit


def lost_shard(workspace: Workspace) -> None:
    path = workspace.root / "model/model.safetensors"
    index = {"metadata": {}, "weight_map": {name: "model-00001-of-00002.safetensors" for name in load_file(path)}}
    workspace.write("model/model.safetensors.index.json", json.dumps(index))
    os.rename(path, workspace.root / "model/model-00002-of-00002.safetensors")


def remove(*names: str) -> Callable[[Workspace], None]:
    return lambda workspace: [(workspace.root / "model" / name).unlink() for name in names]


def dead_link(workspace: Workspace) -> None:
    remove("chat_template.jinja")(workspace)
    os.symlink("nothing", workspace.root / "model/chat_template.jinja")


MODEL = [
    # config.json.
    Case("no config.json", "model.path", ("has no config.json",), edit=remove("config.json")),
    Case("no theta", "model/config.json", ("rope_theta 0 is not above 1", "correct the field"), ("engine.backend=fsdp",), fields(rope_parameters={"rope_type": "default", "rope_theta": 0})),
    # Weights.
    Case("lost shard", "model", ("model-00001-of-00002.safetensors", "get the missing files"), edit=lost_shard),
    Case("missing tensor", "model", (f"1 missing ({UP})",), edit=tensors(lambda t: t.pop(UP))),
    # Tokenizer.
    Case("no tokenizer", "model", ("holds no tokenizer", "tokenizer.save_pretrained"), edit=remove("tokenizer.json")),
    Case("a dead link", "model/chat_template.jinja", ("is a link that leads to no file",), edit=dead_link),
    Case("another tokenizer", "rows.jsonl:", ("vocab_size 10", "belongs to the model"), ("model.init=random",), fields(vocab_size=10)),
]  # fmt: skip

# Checkpoints. `earlier` is a run of one step that these start from or break.
STEP = "earlier/checkpoints/step_00000001"
RESUME = (f"checkpoint.resume={STEP}",)


def shard(change: Callable[[str], None]) -> Callable[[Workspace], None]:
    """An edit of the largest file of the checkpoint."""

    def edit(workspace: Workspace) -> None:
        files = [path for path in (workspace.root / STEP).rglob("*") if path.is_file()]
        change(str(max(files, key=lambda path: path.stat().st_size)))

    return edit


def damaged_run(workspace: Workspace) -> None:
    """The output directory holds a run whose checkpoints are all damaged."""
    shutil.copytree(workspace.root / "earlier", workspace.root / "run")
    (workspace.root / "run/checkpoints/step_00000001/COMPLETE").write_text("{}")


CHECKPOINT = [
    Case("no such folder", "checkpoint.resume", ("is no folder", "auto, never"), ("checkpoint.resume=nowhere",)),
    Case("foreign marker", STEP, ("COMPLETE", "use another checkpoint"), RESUME, lambda w: w.write(f"{STEP}/COMPLETE", '{"a": 1}')),
    Case("cut shard", STEP, ("damaged", "bytes"), RESUME, shard(lambda path: os.truncate(path, 100))),
    Case("another model", STEP, ("of another model", "intermediate_size 48 there and 64 here"), (*RESUME, "model.init=random"), fields(intermediate_size=64)),
    Case("another engine", STEP, ("saved by the megatron engine",), (*RESUME, "engine.backend=fsdp")),
    Case("all damaged", "checkpoint.resume", ("no whole checkpoint", "damaged or foreign"), ("checkpoint.resume=earlier/checkpoints",), lambda w: w.write(f"{STEP}/COMPLETE", "{}")),
    Case("damaged run", "run/checkpoints/step_00000001", ("put one back",), edit=damaged_run),
    Case("remote that cannot be written", "checkpoint.remote", ("file:///proc/nowhere", "cannot be written"), ("checkpoint.remote=file:///proc/nowhere",)),
    Case("nobody logged in", "log.wandb.mode", ("wandb login", "offline"), ("log.wandb={project: p, mode: online}",)),
    Case("other seed", "seed", ("7",), (*RESUME, "seed=7")),
]  # fmt: skip

# Files and rows of `mrl sft`, and of the commands on answers and with teachers.
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


DATA = [
    # Files.
    Case("empty", "data.train", ("rows.jsonl", "is empty"), edit=rows()),
    # Streamed.
    Case("streamed, bad row", "rows.jsonl:3", ("messages is '1+1='",), ("data.stream=true",), rows(GOOD, GOOD, {"messages": "1+1="}, GOOD)),
    # Lines.
    Case("cut line", "rows.jsonl:4", ("is not a JSON object",), edit=rows(GOOD, GOOD, GOOD, '{"messages": [{"role": "us')),
    Case("a batch of a million", "train.global_batch_size", ("each of the 4 rows of data.train 250000 times", "give 4"), ("train.global_batch_size=1000000", "data.train='*.jsonl'")),
    Case("nothing but bad rows", "data.train", ("none of its 4 rows",), ("data.on_bad_row=skip",), rows(*[{"messages": []}] * 4)),
]  # fmt: skip

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
