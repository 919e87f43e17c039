"""What is said of a run that was resumed, from the files of both runs; whole runs are in test_command.py and test_faults.py."""

from __future__ import annotations

import json
import math
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mrl.check import resume
from mrl.errors import UserError


def run_of(place: Path, weights: dict[str, torch.Tensor], **step: float) -> types.SimpleNamespace:
    (place / "hf").mkdir(parents=True)
    save_file(weights, place / "hf" / "model.safetensors")
    if step:
        rows = [{"step": 1, "train/loss": 9.0}, {"step": 2, **step}]
        (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return types.SimpleNamespace(output_dir=str(place))


def test_the_weight_that_is_furthest_off_is_named(tmp_path):
    """Which is the one that was not saved: the others differ by what follows of it."""
    right = {name: torch.ones(3) for name in ("a", "b", "c")}
    whole = run_of(tmp_path / "whole", right)
    assert not list(resume._weights(whole, run_of(tmp_path / "same", right)))
    other = run_of(tmp_path / "other", {"a": torch.ones(3), "b": right["b"] + 0.1, "c": right["c"] + 1e-6})
    (found,) = resume._weights(whole, other)
    assert str(found) == "weights after a resume: 2 of 3 tensors differ, most of all b" and found.parameter == "b"
    (lost,) = resume._weights(whole, run_of(tmp_path / "lost", {"a": torch.ones(3), "b": torch.ones(3) - 0.0}))
    assert lost.parameter == "c"


def test_weights_are_compared_bit_by_bit(tmp_path):
    """-0.0 is another number, and a NaN is the same one."""
    zero, bad = torch.zeros(1), torch.full((1,), math.nan)
    whole, other = run_of(tmp_path / "a", {"x": zero, "y": bad}), run_of(tmp_path / "b", {"x": -zero, "y": bad})
    (found,) = resume._weights(whole, other)
    assert found.parameter == "x" and "1 of 2 tensors differ" in str(found)


def test_metrics_are_compared_but_for_speed(tmp_path):
    whole = run_of(tmp_path / "whole", {}, **{"train/loss": 1.0, "perf/step_s": 2.0, "eval/loss": math.nan})
    same = run_of(tmp_path / "same", {}, **{"train/loss": 1.0, "perf/step_s": 3.0, "eval/loss": math.nan})
    assert not list(resume._steps(whole, same))
    other = run_of(tmp_path / "other", {}, **{"train/loss": 1.0000001, "perf/step_s": 2.0})
    assert [str(problem) for problem in resume._steps(whole, other)] == [
        "step after a resume: eval/loss is None, not nan",
        "step after a resume: train/loss is 1.0000001, not 1.0",
    ]


def test_a_checkpoint_that_cannot_be_read_is_not_the_same(tmp_path):
    runs = [run_of(tmp_path / name, {}) for name in ("whole", "resumed")]
    with pytest.raises(UserError, match="--resume: finds no checkpoint that it can read"):
        list(resume._states(*runs))
