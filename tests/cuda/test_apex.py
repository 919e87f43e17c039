"""NVIDIA's apex without transformer-engine: an update takes AdamW, norms and sums of weights' gradients from its kernels,
which are names here (apex.py)."""

import dataclasses

import pytest

from tests.cuda.cases import DENSE, _case
from tests.cuda.worker import Worker

CASE = _case(DENSE, world=2, tp=2)
LINEAR = 4  # of a layer: queries, keys and values; what attention goes out by; up and gate; down


@pytest.fixture(scope="module")
def worker():
    with Worker(apex=True) as worker:
        yield worker


@pytest.mark.nightly
def test_an_update_is_made_by_its_kernels(worker):
    result, calls = worker.call("tests.cuda.apex:update", CASE)
    assert (
        calls["adam"] == result.updated
        and calls["l2norm"]
        and calls["wgrad"] == LINEAR * CASE.layers * CASE.micro_batches
    )
    assert result.tensors["states"] == result.tensors["masters"] == ["cuda torch.float32"]


@pytest.mark.slow
def test_moments_in_bfloat16_are_rounded_ones_of_torchs_adamw(worker):
    result, calls = worker.call("tests.cuda.apex:update", dataclasses.replace(CASE, bf16_moments=True))
    assert "adam" not in calls
    assert result.tensors["states"] == ["cuda torch.bfloat16", "cuda torch.float32"]  # moments, masters


@pytest.mark.slow
def test_sums_are_apart_where_the_weights_of_the_backward_pass_are_aliases(worker):
    _, calls = worker.call("tests.cuda.apex:update", dataclasses.replace(CASE, offload=("activations",)))
    assert "wgrad" not in calls and calls["adam"]
