"""Layers of the local spec and of transformers call mrl's kernels on CUDA tensors: one operator in each direction. Angles are made once a micro-batch.

Training and sampling on CUDA tensors take the kernels of the output layer and of the draw.
"""

from __future__ import annotations

import pytest

from tests.cuda.cases import DELTA, DENSE, GLM, LATENT, MOE, Case, _case
from tests.cuda.models import fewer_experts

PLAIN = ("_fused_rms_norm", "silu", "silu_backward")
"""What torch's own norm and SwiGLU would dispatch."""

# of two layers and a micro-batch
OF_LAYERS = [
    (Case(DENSE, layers=2), {"rms_norm": 9, "rms_norm_backward": 9, "rotary": 4, "swiglu": 2, "swiglu_backward": 2, "cos": 1, "sin": 1}),
    # the layers run again, and the angles stay
    (Case(DENSE, layers=2, recompute="full"), {"rms_norm": 17, "rms_norm_backward": 9, "rotary": 6, "swiglu": 4, "cos": 1, "sin": 1}),
    (Case(MOE, layers=2, grouped=True, changes=fewer_experts(MOE, 8)), {"swiglu": 2, "swiglu_backward": 2, "rotary": 4}),
    (Case(GLM, layers=2, changes=fewer_experts(GLM, 8)), {"rotary": 4}),  # with channels that do not turn
    # the few channels of queries and keys that turn are one kernel a layer
    (Case(LATENT, layers=2, changes=fewer_experts(LATENT, 16) | {"first_k_dense_replace": 1}), {"rms_norm": 9, "rotary": 4}),
]  # fmt: skip


@pytest.mark.parametrize("case, wanted", OF_LAYERS, ids=str)
def test_layers_call_kernels(worker, case, wanted):
    found = worker.call("tests.cuda.run:run", case).operators
    assert not [name for name in PLAIN if name in found]
    assert {name: found[name] / case.micro_batches for name in wanted} == wanted


def test_gated_attention_and_delta_nets(worker):
    """Qwen3.5: norms by 1 + weight. A delta net's gated norm is torch's."""
    case = Case(DELTA, layers=2, micro_batches=1, changes={"full_attention_interval": 2})
    found = worker.call("tests.cuda.run:run", case).operators
    assert (found["rms_norm"], found["rotary"], found["swiglu"]) == (2 * 2 + 2 + 1, 2, 2)


@pytest.mark.parametrize(
    "family, norms, mlps", [("qwen3", 2 * 4 + 1, 2), ("llama", 2 * 2 + 1, 2), ("gemma2", 2 * 4 + 1, 0)]
)
def test_models_of_transformers(worker, family, norms, mlps):
    found = worker.call("tests.cuda.operators:count_of_transformers", family)
    assert (found["rms_norm"], found["rms_norm_backward"], found["rotary"]) == (norms, norms, 2 * 2)
    assert (found.get("swiglu", 0), found.get("swiglu_backward", 0)) == (mlps, mlps)
    assert (found["cos"], found["sin"], found.get("rsqrt", 0)) == (1, 1, 0)


@pytest.mark.slow
def test_a_temperature_is_part_of_the_draw(worker):
    """Beside a replay of the step's graph it takes no operation."""
    plain, warm = (
        worker.call("tests.cuda.decoding:steps", _case(DENSE), cuda_graphs=True, filters=filters)
        for filters in ({}, {"temperature": 0.7})
    )
    assert plain.replays == warm.replays == 1.0
    assert warm.operations == plain.operations


@pytest.mark.parametrize(
    "tokens, columns, dtype", [(4096, 32768, "bfloat16"), (20000, 32768, "bfloat16"), (8192, 32768, "float32")]
)
def test_a_heads_operators_and_memory(worker, tokens, columns, dtype):
    found = worker.call("tests.cuda.vocabulary:head", tokens, columns, dtype)
    assert found.operators["head_sums"] == found.operators["head_gradient_"] == found.chunks
    products = sum(found.operators.get(name, 0) for name in ("mm", "addmm", "addmm_"))
    assert products == 4 * found.chunks and found.chunks == {4096: 1, 20000: 3, 8192: 2}[tokens]
    assert sum(found.operators.values()) <= 6 * found.chunks + 10
    assert found.logits <= 2**29 and found.peak <= found.logits + found.gradients + 2**20
