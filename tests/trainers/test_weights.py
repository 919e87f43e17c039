"""Weights of rows and messages in training: the loss and gradient of torch on transformers' model, and of rows repeated."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mrl.metrics import read
from tests.engine.harness import run_case
from tests.tiers import in_tiers
from tests.trainers import tiny_runs

LAYOUTS = {
    "fsdp": (1, {"backend": "fsdp"}),
    "megatron dp2": (2, {"backend": "megatron"}),
    "megatron cp2": (2, {"backend": "megatron", "parallel": {"cp": 2}}),
    "megatron pp2": (2, {"backend": "megatron", "parallel": {"pp": 2}}),
}  # fmt: skip


def rows() -> list[dict[str, Any]]:
    """Conversations of two answers, some with weights."""
    talks = [tiny_runs.chat([i] * (1 + i % 3))["messages"] + tiny_runs.chat([i + 40])["messages"] for i in range(4)]
    talks[1][1]["weight"], talks[1][3]["weight"] = 0, 0.25
    talks[2][3]["weight"] = 1.5
    return [{"messages": talk} | ({"weight": weight} if weight != 1 else {}) for talk, weight in
            zip(talks, (2, 1, 0.5, 0), strict=True)]  # fmt: skip


def step(inputs: pathlib.Path, place: pathlib.Path, made: list[dict], world: int, engine: dict) -> tuple[float, float]:
    """Loss and gradient norm of the first step, all rows in its batch."""
    place.mkdir()
    config = tiny_runs.make_config(
        inputs, place / "run", data={"train": tiny_runs.write_rows(place / "rows.jsonl", made)}, engine=engine, optimizer={"warmup_steps": 0},
        train={"steps": 1, "global_batch_size": len(made)}, checkpoint={"export_hf": False},
    )  # fmt: skip
    assert run_case(world, "tests.trainers.cases:train", config=config)[:2] == ("done", "")
    (row,) = read(place / "run" / "metrics.jsonl")
    return row["train/loss"], row["train/grad_norm"]


def by_hand(inputs: pathlib.Path, made: list[dict]) -> tuple[float, float]:
    """sum w nll / sum w and the norm of its gradient, by torch alone; answers are found by the template's own marks."""
    model = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for row in made:
        talk = [{"role": m["role"], "content": m["content"]} for m in row["messages"]]
        found = tokenizer.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
        ids, marks, answers = found["input_ids"], found["assistant_masks"], iter(row["messages"][1::2])
        nll = -model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        weight = 0.0
        for i, mark in enumerate(marks):
            if mark and not marks[i - 1]:
                weight = next(answers).get("weight", 1) * row.get("weight", 1)
            if mark:
                total, count = total + weight * nll[i - 1, ids[i]], count + weight
    loss = total / count
    loss.backward()
    return loss.item(), float(torch.stack([p.grad.double().norm() for p in model.parameters()]).norm())


@pytest.mark.parametrize("layout", in_tiers(["fsdp", "megatron dp2"], ["megatron cp2"], LAYOUTS))
def test_the_loss_is_the_weighted_sum_over_the_weights(inputs, tmp_path, layout):
    made, (world, engine) = rows(), LAYOUTS[layout]
    expected = by_hand(inputs, made)
    assert step(inputs, tmp_path / "weighted", made, world, engine) == pytest.approx(expected, rel=1e-5)
