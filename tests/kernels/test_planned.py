"""`mrl plan` calls the kernels' autograd functions on tensors without memory. They take the bytes of functions whose
kernels run, to the byte."""

from __future__ import annotations

import pytest
import torch

from mrl.engine.logprobs import VocabShard, log_probs_from_hidden
from mrl.engine.peak_bytes import PeakBytes
from mrl.kernels import layers, operators
from mrl.mcore_models import dispatch

T, N, V, CHOSEN = 24, 64, 500, 2
BF16, FP32, INT = torch.bfloat16, torch.float32, torch.int64
HEADS, CHANNELS, ROWS, PLACES = (T, 4, N), (T, N), (T, CHOSEN), (T * CHOSEN,)


def head(hidden, weight, labels):
    """In fp32, because a CPU takes a tensor more to add a product to a sum in another dtype. In one chunk, because
    Triton's interpreter holds a launch's tensors until Python collects garbage."""
    found = log_probs_from_hidden(hidden, weight, labels, shard=VocabShard(V), entropy="differentiable", chunk=T)
    return found[0] + found[1]


CASES = {
    "norm": (lambda x, weight: layers.rms_norm(x, weight, 1e-6), [(CHANNELS, BF16), ((N,), BF16)]),
    "rotary": (layers.rotary, [(HEADS, BF16), ((T, 2, N), BF16), (CHANNELS, BF16), (CHANNELS, BF16)]),
    "swiglu": (layers.swiglu, [((T, 2 * N), BF16)]),
    "weighted swiglu": (lambda x, weights: layers.swiglu(x, weights=weights), [((T, 2 * N), BF16), ((T, 1), FP32)]),
    "head": (head, [(CHANNELS, FP32), ((V, N), FP32), ((T,), INT)]),
    "rows of experts": (dispatch.CopyToRows.apply, [(CHANNELS, BF16), (ROWS, INT), (PLACES, INT)]),
    "sums of rows": (dispatch.SumOfRows.apply, [((T * CHOSEN, N), BF16), (ROWS, INT), (PLACES, INT)]),
}


def taken(name, device):
    """Returns the bytes that the outputs and the backward pass keep, and the most at once in both passes."""
    function, given = CASES[name]
    inputs = [torch.ones(shape, dtype=dtype, device=device) for shape, dtype in given]
    for one in inputs:
        one.requires_grad_(one.is_floating_point())
    with PeakBytes(device, block=512) as memory:
        outputs = function(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        kept = memory.alive
        torch.autograd.backward(outputs, [torch.ones_like(one) for one in outputs])
        return kept, memory.peak


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_kernels_that_run(name):
    real = taken(name, "cpu")
    with operators.planned():
        assert taken(name, "meta") == real


def test_a_plan_counts_kernels_where_it_says_so():
    with operators.planned():
        kernels = taken("rows of experts", "meta")
    with operators.planned(False):
        assert taken("rows of experts", "meta") > kernels
