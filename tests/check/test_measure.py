"""One step of an engine against the reference: right layouts are the same, and a fault is named by what it changes."""

from __future__ import annotations

import dataclasses

import pytest

from mrl.check.compare import clue
from tests.check import works
from tests.engine.harness import run_case
from tests.tiers import in_tiers, nightly_but

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
