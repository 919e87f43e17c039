"""One step of an engine against the reference: right layouts are the same, and a fault is named by what it changes.

Whole runs of `mrl check` on a copy of mrl with a fault in it: each is found, where it is, by name.

Tokens between two experts: found with transformers, and no fault of a layout that chose the other one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mrl.check import compare, reference
from mrl.check.compare import clue
from tests.check import works
from tests.check.faults import PLANTED
from tests.check.works import make_configs
from tests.engine import tiny
from tests.engine.harness import run_case
from tests.tiers import in_tiers, nightly_but, slow_but
from tests.trainers.tiny_runs import REPO

MEASURED = "tests.check.faults:measured"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return works.make(tmp_path_factory.mktemp("llama"))


def measured(world: int, work, fault: str = "none"):
    return run_case(world, MEASURED, work=work, fault=fault)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "backend", "parallel"),
    nightly_but(
        [(2, "megatron", "tp2"), (2, "fsdp", "dp2")],
        [
            (1, "megatron", "dp1"),
            (2, "megatron", "tp2"),
            (2, "megatron", "pp2"),
            (2, "megatron", "cp2"),
            (2, "megatron", "dp2"),
            (2, "fsdp", "dp2"),
            (2, "fsdp", "cp2"),
        ],
    ),
)
def test_a_right_layout_is_the_same(llama, world, backend, parallel):
    degrees = {} if parallel.startswith("dp") else {parallel[:2]: int(parallel[2:])}
    found, wrong = measured(world, llama.work(backend=backend, **degrees))
    assert not wrong
    assert found.start.error == 0.0 and found.start.compared == found.weights.compared == found.gradients.compared == 39
    assert 0 < found.gradients.error < 1e-5 and found.weights.error < 1e-4


@pytest.mark.parametrize(
    ("family", "parallel"),
    in_tiers([], [("qwen3_5", {"tp": 2})], [("qwen3_5", {"tp": 2}), ("qwen3_5_moe", {"cp": 2})]),
    ids=["qwen3_5 tp2", "qwen3_5_moe cp2"],
)
def test_layouts_of_gated_delta_nets_are_the_same(tmp_path, family, parallel):
    found, wrong = measured(2, works.make(tmp_path, family).work(**parallel))
    assert not wrong and found.start.error == 0.0 and 0 < found.gradients.error < 1e-5


def test_a_missing_all_reduce_is_seen_in_gradients_alone(llama):
    _, (first, *others) = measured(2, llama.work(), "missing gradient all-reduce")
    assert first.quantity == "gradients" and first.parameter.startswith("model.")
    assert "of 39 tensors are off" in first.text
    assert "how gradients are summed over ranks" in clue([first, *others])
    assert not measured(1, llama.work(), "missing gradient all-reduce")[1]  # there is nobody to add up with


def test_a_wrong_interleave_is_seen_in_log_probs_and_named_by_its_weights(llama):
    found, (first, *others) = measured(1, llama.work(), "wrong QKV interleave")
    assert first.quantity == "log-probs" and not found.start.over  # it is undone on the way out
    named = next(problem for problem in others if problem.quantity == "gradients")
    assert any(part in named.parameter for part in ("q_proj", "k_proj", "v_proj")), named
    assert "the forward pass is not" in clue([first, *others])


def test_another_optimizer_is_seen_in_weights_alone(llama):
    work = llama.work()
    optimizer = dataclasses.replace(work.config.optimizer, weight_decay=0.5)
    work = dataclasses.replace(work, config=dataclasses.replace(work.config, optimizer=optimizer))
    _, (only,) = measured(1, work)
    assert only.quantity == "weights after a step" and "updated otherwise" not in only.text and only.parameter
    assert clue([only]) == "gradients are right: look at the optimizer"


SLOW = ["sharded parameter not loaded"]  # of a layout; the tests above have others in worlds of processes


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("check")
    make_configs(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(SLOW, PLANTED, pytest.mark.nightly))
def test_a_planted_fault_is_found_by_name(place, tmp_path, name):
    fault = PLANTED[name]
    shutil.copytree(REPO / "mrl", tmp_path / "mrl")  # with its bytecode
    file = tmp_path / "mrl" / fault.file
    source = file.read_text(encoding="utf-8")
    for text, replacement in fault.changes:
        assert source.count(text) == 1, text
        source = source.replace(text, replacement)
    file.write_text(source, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mrl", "check", "sft.yaml", *fault.words.split(), "--json", "--save", "check.json"],
        env=os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}, cwd=place, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    found = json.loads(done.stdout)
    assert json.loads((place / "check.json").read_text())["check"] == found
    verdicts = {row["layout"]: row for row in found["rows"]}
    assert [row for row in fault.same if verdicts[row]["verdict"] != "same"] == []
    if fault.row:
        assert fault.row in found["different"]
        row = verdicts[fault.row]
        assert row["problems"] and row["problems"][0]["quantity"] == fault.quantity, row
        assert fault.says in f"{row['problems']} {row['clue']}", row
    else:
        assert any(line.startswith(f"{fault.quantity}: ") and fault.says in line for line in found["batch"]), found


def alike(model: torch.nn.Module, apart: float = 0.0) -> None:
    """Makes the routers score experts 0 and 1 alike, or all of two groups."""
    size = model.config.num_local_experts // model.config.n_group if hasattr(model.config, "n_group") else 1
    for name, tensor in model.state_dict().items():  # weights and biases
        if ".mlp.gate." in name or ".mlp.router." in name:
            tensor[size : 2 * size] = tensor[:size] * (1 + apart)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_narrow_choice_is_seen_from_there_on(tmp_path, family):
    folder = tiny.make_model(str(tmp_path / "model"), family)
    examples = tiny.examples_of(tiny.uneven_batch(sequences=4))
    model = reference.load(folder)
    assert reference.undecided_tokens(model, examples, head="lm", rounding=1e-7) is None
    with torch.no_grad():
        alike(model, apart=1e-6)
    found = reference.undecided_tokens(model, examples, head="lm", rounding=1e-4)
    assert found is not None and 0 < found.sum() <= len(found) == sum(len(example.ids) - 1 for example in examples)
    for of_sequence in found.split([len(example.ids) - 1 for example in examples]):
        assert torch.equal(of_sequence, of_sequence.cummax(0).values)


def test_what_is_narrow_is_the_last_choice():
    """Of the best two: whether the second may have been the third, not whether the first may have been the second."""
    scores_TE = torch.tensor([[3.0, 3.0, 1.0, 0.0], [3.0, 1.0, 1.0, 0.0], [3.0, 1.0, 0.0, 0.0]])
    with reference._Choices(1e-4) as choices:
        torch.topk(scores_TE, 2)
    assert choices.narrow.tolist() == [False, True, False]


def test_a_dense_model_decides_nothing(tmp_path):
    folder = tiny.make_model(str(tmp_path / "model"), "llama")
    assert not reference.has_experts({"num_attention_heads": 4}) and reference.has_experts({"n_routed_experts": 8})
    examples = tiny.examples_of(tiny.uneven_batch(sequences=3))
    assert reference.undecided_tokens(reference.load(folder), examples, head="lm", rounding=1.0) is None


@pytest.fixture(scope="module")
def torn(tmp_path_factory) -> works.Checked:
    """A model whose routers score two experts alike that are not."""
    return works.make(tmp_path_factory.mktemp("torn"), "qwen3_moe", change=alike)


@pytest.mark.nightly
@pytest.mark.parametrize(("fault", "excused"), [("another choice of experts", True), ("wrong QKV interleave", False)])
def test_another_choice_of_experts_is_told_from_a_fault(torn, fault, excused):
    found, differ = run_case(1, MEASURED, work=torn.work(), fault=fault)
    assert found.log_probs > 1e-2 and differ[0].quantity == "log-probs"
    assert (compare.undecided(found, differ) is not None) is excused
    assert (found.decided_log_probs < 1e-5) is excused
    assert 0 < torn.undecided.sum() < len(torn.undecided)
