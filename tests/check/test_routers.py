"""Tokens between two experts: found with transformers, and no fault of a layout that chose the other one."""

from __future__ import annotations

import pytest
import torch

from mrl.check import compare, reference
from tests.check import works
from tests.engine import tiny
from tests.engine.harness import run_case

MEASURED = "tests.check.faults:measured"


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
