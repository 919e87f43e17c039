"""What is seen of a run, as values that the table of test_keys_reach.py can name."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mrl.batch import make_batch
from mrl.config.schema import OptimizerConfig
from mrl.config.sections import MuonConfig
from tests.config.reach import Run
from tests.engine import tiny

Look = Callable[[Run], Any]

# ---------------------------------------------------------------------------------------------------- data and order


def rows(run: Run, *, trains: bool = True) -> list[int]:
    """The numbers that the questions begin with, which tell rows apart, in the order of the data."""
    return [int(re.search(r"user\n(\d+)", text)[1]) for text in texts(run, trains=trains)]


def texts(run: Run, *, trains: bool = True) -> list[str]:
    """Sequences as text."""
    tokenizer = AutoTokenizer.from_pretrained(run.inputs / "dense")
    return [tokenizer.decode(ids) for ids in run.sequences(trains=trains)]


def sorted_rows(run: Run) -> list[int]:
    return sorted(rows(run))


def first_text(run: Run) -> str:
    return texts(run)[0]


def evaluated_rows(run: Run) -> list[int]:
    return rows(run, trains=False)


def epochs(run: Run) -> dict[str, bool]:
    """Of a run of two epochs."""
    order = rows(run)
    first, second = order[: len(order) // 2], order[len(order) // 2 :]
    assert sorted(first) == sorted(second)
    return {"as in the file": first == sorted(first), "the same again": first == second}


def lengths(run: Run) -> list[list[int]]:
    """Tokens of each sequence of each micro-batch of the first step, which the model is given without the last."""
    return sorted(sorted(len(ids) - 1 for ids in batch.ids) for batch in run.batches() if batch.step == 1)


def ends(run: Run) -> list[tuple[int, int]]:
    """First and last token of each sequence."""
    return [(ids[0], ids[-1]) for ids in run.sequences()]


def layer_spec(run: Run) -> str | None:
    """What its config.yaml says that its layers are made of."""
    found = re.search(r"^# layer_spec: (\S*)", (run.folder / "config.yaml").read_text(), re.MULTILINE)
    return found and found[1]


def left_out(run: Run) -> str | None:
    """What the run says about rows that were not used as they are."""
    found = re.search(r"^data\.train: rows (.*)$", run.said, re.MULTILINE)
    return found and found[1]


# ----------------------------------------------------------------------------------------------------------- numbers


def metric(name: str) -> Look:
    """A metric of every step; None where it is not there."""
    return lambda run: [row.get(name) for row in run.metrics]


def steps_with(name: str) -> Look:
    return lambda run: [row["step"] for row in run.metrics if name in row]


def is_in_metrics(name: str) -> Look:
    """Whether a metric is there in any step."""
    return lambda run: any(name in row for row in run.metrics)


def eval_loss_is_train_loss(run: Run) -> bool | None:
    """Of a run that hardly trains; None where it evaluates nothing."""
    last = run.metrics[-1]
    return math.isclose(last["eval/loss"], last["train/loss"], rel_tol=1e-5) if "eval/loss" in last else None


def the_same_as_with(what: Look, **keys: Any) -> Look:
    """Whether `what` is the same in a run with other keys."""
    return lambda run: what(run) == what(run.other(**keys))


def noted(name: str) -> Look:
    """What rank 0 saw (Seen of reach.py or reach_ppo.py)."""
    return lambda run: getattr(run.ranks[0], name)


def all_of(*looks: Look) -> Look:
    return lambda run: tuple(look(run) for look in looks)


# ------------------------------------------------------------------------------------------------------------ weights


def exported_model(run: Run) -> str | None:
    """The input model that has the exported weights (of a run that hardly trains)."""
    for name in ("dense", "other"):
        stored = load_file(run.inputs / name / "model.safetensors")
        if all(torch.allclose(run.weights[key], value, rtol=0, atol=1e-20) for key, value in stored.items()):
            return name
    return None


# ----------------------------------------------------------------------------------------------------------- adapters


def adapter(run: Run) -> dict[str, torch.Tensor]:
    """The exported adapters, by their name in peft's file."""
    return load_file(run.folder / "hf" / "adapter_model.safetensors")


def ranks(run: Run) -> set[int]:
    return {a.shape[0] for name, a in adapter(run).items() if "lora_A" in name}


# ------------------------------------------------------------------------------------------------------------- weights


def spread(run: Run) -> float:
    """Standard deviation of the exported embedding, to two digits."""
    return round(float(run.weights["model.embed_tokens.weight"].float().std()), 2)


def norms_are_one(run: Run) -> bool:
    return all(bool((value == 1).all()) for name, value in run.weights.items() if name.endswith("layernorm.weight"))


def dtypes(run: Run) -> tuple[set[str], set[str]]:
    """Of the exported tensors, and of what the layers compute with."""
    exported = {str(value.dtype).removeprefix("torch.") for value in run.weights.values()}
    return exported, {call.dtype for call in run.calls("mlp")}


def small_updates_add_up(run: Run) -> bool:
    """Whether weights moved whose every single update is below the rounding of bfloat16."""
    rate, halfway = run.config["optimizer.lr"], 2**-11  # between two numbers of bfloat16 from 0.125 to 0.25
    assert 4 * rate <= halfway < run.config["train.steps"] * rate, "AdamW moves a weight by up to the rate"
    stored = load_file(run.inputs / "dense" / "model.safetensors")["model.embed_tokens.weight"]
    before, after = stored.bfloat16(), run.weights["model.embed_tokens.weight"].bfloat16()
    one_update_rounds_off = (before.abs() > 0.125) & ((stored - before.float()).abs() < halfway / 2)
    return bool((after != before)[one_update_rounds_off].any())


def optimizer_has(name: str, *candidates: Any, bound: float = 2e-2) -> Look:
    """Those values of optimizer.NAME with which plain torch makes of the model what the run exported."""

    def look(run: Run) -> list[Any]:
        return [value for value in candidates if distance(run, name, value) < bound]

    return look


def muon_is_exact(run: Run) -> bool:
    return distance(run, "name", "muon") < 1e-3


def distance(run: Run, name: str, value: Any) -> float:
    """How far the run's update of all weights is from that of plain torch with another value of optimizer.NAME."""
    start, expected = (
        load_file(pathlib.Path(run.config["model.path"]) / "model.safetensors"),
        reference_weights(run, name, value),
    )
    actual, update = (
        torch.cat([(weights[key] - start[key]).flatten() for key in sorted(start)])
        for weights in (run.weights, expected)
    )
    return tiny.relative_l2(actual, update)


def reference_weights(run: Run, name: str, value: Any) -> dict[str, torch.Tensor]:
    """What plain torch makes of the model on the batch that the run had in each of its steps."""
    given = {k.removeprefix("optimizer."): v for k, v in run.config.items() if k.startswith("optimizer.")} | {
        name: value
    }
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    of_muon = {k.removeprefix("muon."): given.pop(k) for k in list(given) if k.startswith("muon.")}
    optimizer = OptimizerConfig(**given, muon=MuonConfig(**of_muon))
    if not optimizer.clip_grad:
        optimizer = dataclasses.replace(optimizer, clip_grad=math.inf)
    sequences = json.dumps([run.first_batch.ids, run.first_batch.mask])
    return trained_reference(run.config["model.path"], optimizer, run.config["train.steps"], sequences)


@functools.cache
def trained_reference(path: str, optimizer: OptimizerConfig, steps: int, sequences: str) -> dict[str, torch.Tensor]:
    batch = make_batch(*json.loads(sequences))
    return tiny.hf_reference(path, batch, optimizer=optimizer, total_steps=steps, steps=steps).weights


# ------------------------------------------------------------------------------------------------ layout and the model


def forwards(run: Run) -> dict[str, int]:
    """Forward calls in a training step of one micro-batch, of each layer's attention and MLP."""
    layers = len({name for name in run.ranks[0].parameters if "input_layernorm" in name})
    return {name: len(run.calls(name)) // layers for name in ("attention", "mlp")}


def forwards_of_all(run: Run) -> int:
    """Forward calls of all layers' MLPs in a training step of one micro-batch."""
    return len(run.calls("mlp"))


def part_held(run: Run) -> list[float]:
    """The part of the parameters that each rank holds."""
    return [seen.held / sum(map(math.prod, seen.parameters.values())) for seen in run.ranks]


def compiled(run: Run) -> bool:
    """Whether torch.compile made anything."""
    return run.ranks[0].compiled > 0


def heads(run: Run) -> list[int]:
    """Attention heads that each rank computes."""
    return [run.calls("attention", rank)[0].shape[-2] for rank in range(len(run.ranks))]


def layers_run(run: Run) -> list[list[int]]:
    """The numbers of the layers that each rank runs."""
    return [sorted({call.layer for call in run.calls("layer", rank)}) for rank in range(len(run.ranks))]


def tokens_run(run: Run) -> list[int]:
    """Tokens that the model is given in each micro-batch on rank 0, padding included."""
    return sorted(math.prod(call.shape) for call in run.calls("embedding"))


def tokens_between_blocks(run: Run) -> list[int]:
    """Tokens that a layer is given on each rank, of micro-batches of one length."""
    found = [{call.shape[0] for call in run.calls("layer input", rank)} for rank in range(len(run.ranks))]
    return [tokens for of_rank in found for tokens in of_rank]


def tokens_embedded(run: Run) -> list[set[int]]:
    """Tokens that the embedding is given on each rank in a micro-batch, padding included."""
    return [{math.prod(call.shape) for call in run.calls("embedding", rank)} for rank in range(len(run.ranks))]


def experts(run: Run) -> tuple[int, int]:
    """Experts of a layer on rank 0, and rows of the first matrix of one."""
    held = {
        name: shape for name, shape in run.ranks[0].parameters.items() if re.search(r"layers\.0\..*experts.*fc1", name)
    }
    return len(held), next(iter(held.values()))[0]


def sequences_in_first_step(run: Run) -> int:
    """Over all ranks."""
    return sum(len(b.ids) for seen in run.ranks for b in seen.micro_batches if b.step == 1)


# ------------------------------------------------------------------------------------------------------- what is left


def names(folder: pathlib.Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def places(run: Run) -> list[str]:
    """Where the run has written, of the places that it had for itself."""
    return [name for name in names(run.root) if name != "home"]


def checkpoints(where: str = "checkpoints") -> Look:
    """Steps of the whole checkpoints in a folder beside or below output_dir."""
    return lambda run: [
        int(name.removeprefix("step_")) for name in names(run.folder / where) if name.startswith("step_")
    ]


def marker(run: Run) -> str:
    """The engine that the newest checkpoint says has written it."""
    (folder,) = (run.folder / "checkpoints").glob("step_*")
    return json.loads((folder / "COMPLETE").read_text())["backend"]


def loads_in_transformers(run: Run) -> bool:
    return (run.folder / "hf").exists() and AutoModelForCausalLM.from_pretrained(run.folder / "hf") is not None


def printed(run: Run) -> str:
    """A live bar, lines, or nothing."""
    if not run.said:
        return "nothing"
    assert "step 1" in run.said
    return "bar" if "\x1b[" in run.said else "lines"


def step_lines(run: Run) -> int:
    """How many lines of steps the terminal had."""
    return len(re.findall(r"^step \d", run.said, re.MULTILINE))


def tensorboard_steps(run: Run) -> list[int] | None:
    """Those whose train/loss is that of metrics.jsonl."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if not (run.folder / "tb").exists():
        return None
    events = EventAccumulator(str(run.folder / "tb")).Reload().Scalars("train/loss")
    return [
        event.step
        for event in events
        if math.isclose(event.value, run.metrics[event.step - 1]["train/loss"], rel_tol=1e-6)
    ]


def wandb_run(run: Run) -> tuple[str, str, str] | None:
    """How wandb ran, and the project and the name of the run in the file that it wrote."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = list((run.folder / "wandb").glob("*run-*/*.wandb"))
    if not found:
        return None
    content, at = found[0].read_bytes(), 7
    while at < len(content):  # a log of LevelDB: crc, length, type
        size, record = int.from_bytes(content[at + 4 : at + 6], "little"), Record()
        record.ParseFromString(content[at + 7 : at + 7 + size])
        if record.HasField("run"):
            how = "offline" if found[0].parent.name.startswith("offline-") else "online"
            return how, record.run.project, record.run.display_name
        at += 7 + size
    raise AssertionError(f"{found[0]} has no run in it")
