"""Layers of the local spec and of transformers call mrl's kernels on CUDA tensors: one operator in each direction. Angles are made once a micro-batch."""

from __future__ import annotations

import pytest

from tests.cuda.cases import DELTA, DENSE, GLM, LATENT, MOE, Case
from tests.cuda.models import fewer_experts

MICRO_BATCHES = 2
PLAIN = ("_fused_rms_norm", "silu", "silu_backward")
"""What torch's own norm and SwiGLU would dispatch."""


def counted(worker, model, **options):
    """Returns how often an operator runs in a micro-batch of two layers."""
    changes = fewer_experts(model, 8) if model in (MOE, GLM) else options.pop("changes", {})
    case = Case(model, layers=2, micro_batches=MICRO_BATCHES, changes=changes, **options)
    found = worker.call("tests.cuda.operators:count", case)
    assert not [name for name in PLAIN if name in found]
    return {name: count / MICRO_BATCHES for name, count in found.items()}


def test_dense_layers(worker):
    found = counted(worker, DENSE)
    assert (found["rms_norm"], found["rms_norm_backward"]) == (2 * 4 + 1, 2 * 4 + 1)
    assert (found["rotary"], found["swiglu"], found["swiglu_backward"]) == (2 * 2, 2, 2)
    assert (found["cos"], found["sin"]) == (1, 1)


def test_recomputed_layers(worker):
    """The layers run again, and the angles stay."""
    found = counted(worker, DENSE, recompute="full")
    assert (found["rms_norm"], found["rms_norm_backward"]) == (2 * 4 * 2 + 1, 2 * 4 + 1)
    assert (found["rotary"], found["swiglu"]) == (2 * 3, 2 * 2)
    assert (found["cos"], found["sin"]) == (1, 1)


def test_experts_with_their_weights(worker):
    found = counted(worker, MOE, grouped=True)
    assert (found["swiglu"], found["swiglu_backward"], found["rotary"]) == (2, 2, 2 * 2)


def test_channels_that_do_not_turn(worker):
    found = counted(worker, GLM)
    assert found["rotary"] == 2 * 2


def test_latent_attention(worker):
    """Its norms and MLPs, and the few channels of queries and keys that turn, in one kernel a layer."""
    changes = fewer_experts(LATENT, 16) | {"first_k_dense_replace": 1}
    found = counted(worker, LATENT, changes=changes)
    assert (found["rms_norm"], found["rotary"]) == (2 * 4 + 1, 2 * 2)


def test_gated_attention_and_delta_nets(worker):
    """Qwen3.5: norms by 1 + weight. A delta net's gated norm is torch's."""
    found = worker.call(
        "tests.cuda.operators:count", Case(DELTA, layers=2, micro_batches=1, changes={"full_attention_interval": 2})
    )
    assert (found["rms_norm"], found["rotary"], found["swiglu"]) == (2 * 2 + 2 + 1, 2, 2)


@pytest.mark.parametrize(
    "family, norms, mlps", [("qwen3", 2 * 4 + 1, 2), ("llama", 2 * 2 + 1, 2), ("gemma2", 2 * 4 + 1, 0)]
)
def test_models_of_transformers(worker, family, norms, mlps):
    found = worker.call("tests.cuda.operators:count_of_transformers", family)
    assert (found["rms_norm"], found["rms_norm_backward"], found["rotary"]) == (norms, norms, 2 * 2)
    assert (found.get("swiglu", 0), found.get("swiglu_backward", 0)) == (mlps, mlps)
    assert (found["cos"], found["sin"], found.get("rsqrt", 0)) == (1, 1, 0)
