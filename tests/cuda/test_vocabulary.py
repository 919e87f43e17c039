"""Training and sampling on CUDA tensors take the kernels of the output layer and of the draw."""

from __future__ import annotations

import pytest

from tests.cuda.cases import DENSE, _case


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
