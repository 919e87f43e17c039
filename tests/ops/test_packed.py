"""Attention of packed sequences in one operator: on a CPU the bits of each length apart, on CUDA one call of flash-attn.

The reference of CUDA's calls is flash-attn written out (`test_flash.FlashAttention`), given each sequence by itself.
"""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mrl.ops import flash, packed
from mrl.ops.causal import causal_attention
from mrl.ops.masked import ScoreRule
from mrl.ops.packed import Documents, has_packed_kernel, packed_attention, runs_of
from tests.ops.test_flash import FlashAttention, OnGpu

LENGTHS = (3, 3, 5, 1, 2 * flash.BLOCK + 5, 7)
CPU = torch.device("cpu")
WINDOWS = ((None, False), (None, True), (4, True), (flash.BLOCK + 2, False))


def tensors(dtype, sinks, *, lengths=LENGTHS, size=8):
    torch.manual_seed(0)
    made = [torch.randn(sum(lengths), heads, size, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]
    return [*made, torch.randn(4, dtype=dtype, requires_grad=True) if sinks else None]


def one_after_another(query, key, value, rule):
    """As attention of each run of equal lengths was before: autograd joins them."""
    runs = runs_of(LENGTHS)
    parts = []
    for (_, count, length), *run in zip(
        runs, *(t.split([count * length for _, count, length in runs]) for t in (query, key, value)), strict=True
    ):
        of_run = (t.unflatten(0, (count, length)).transpose(1, 2) for t in run)
        parts.append(causal_attention(*of_run, rule).transpose(1, 2).flatten(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window, sinks", WINDOWS)
def test_a_cpu_has_the_bits_of_each_length_apart(dtype, sinks, window):
    query, key, value, of_sinks = tensors(dtype, sinks)
    documents, rule = Documents.of(LENGTHS, CPU), ScoreRule(0.3, window, of_sinks)
    out = packed_attention(query, key, value, documents.cu_seqlens, documents.max_seqlen, rule)
    wanted = one_after_another(query, key, value, rule)
    inputs = [t for t in (query, key, value, of_sinks) if t is not None]
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, grad)
    assert torch.equal(out, wanted)
    assert all(map(torch.equal, found, torch.autograd.grad(wanted, inputs, grad)))


@pytest.mark.parametrize("sinks", [False, True])
def test_the_operators_are_as_they_are_declared(sinks):
    """Shapes, strides, nothing changed in place or aliased, and autograd, also as torch.compile traces it."""
    query, key, value, of_sinks = tensors(torch.float32, sinks)
    documents = Documents.of(LENGTHS, CPU)
    rule = (documents.cu_seqlens, documents.max_seqlen, of_sinks, 0.3, 4)
    torch.library.opcheck(torch.ops.mrl.packed_attention.default, (query, key, value, *rule))
    with torch.no_grad():
        out, sums = torch.ops.mrl.packed_attention(query, key, value, *rule)
    given = [t if t is None else t.detach() for t in (torch.randn_like(out), query, key, value, out, sums)]
    rule = (documents.cu_seqlens, documents.max_seqlen, None if of_sinks is None else of_sinks.detach(), 0.3, 4)
    torch.library.opcheck(torch.ops.mrl.packed_attention_backward.default, (*given, *rule))


class PackedFlashAttention:
    """flash-attn of packed sequences as torch calls it: [T, heads, D], places in int32, sums [heads, T]."""

    def __init__(self, lengths):
        self.places, self.calls = [*itertools.accumulate(lengths, initial=0)], 0

    def parts(self, cum_q, cum_k, max_q, max_k, dropout, *tensors):
        self.calls += 1
        assert cum_q is cum_k and cum_q.dtype == torch.int32 and cum_q.tolist() == self.places
        assert max_q == max_k == cum_q.diff().max() and dropout == 0.0
        assert all(t.dim() == 3 and t.shape[0] == self.places[-1] and t.stride(-1) == 1 for t in tensors)
        return itertools.pairwise(self.places)

    def forward(self, q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *, scale, **sides):
        outs, sums = [], []
        for a, b in self.parts(cum_q, cum_k, max_q, max_k, dropout, q, k, v):
            given = (t[None, a:b] for t in (q, k, v))
            one = FlashAttention().forward(*given, None, None, b - a, b - a, 0.0, causal, debug, scale=scale, **sides)
            outs.append(one[0][0])
            sums.append(one[1][0])
        return torch.cat(outs), torch.cat(sums, dim=1), torch.zeros(2), torch.zeros(1), torch.zeros(0)

    def backward(self, grad, q, k, v, out, sums, cum_q, cum_k, max_q, max_k, dropout, causal, rng, unused, *, scale,
                 **sides):  # fmt: skip
        assert sums.shape == (q.shape[1], q.shape[0]) and sums.is_contiguous()
        grads = []
        for a, b in self.parts(cum_q, cum_k, max_q, max_k, dropout, grad, q, k, v, out):
            given = (t[None, a:b] for t in (grad, q, k, v, out))
            lengths, state = (None, None, b - a, b - a, 0.0, causal), FlashAttention.state
            grads.append(FlashAttention().backward(*given, sums[None, :, a:b], *lengths, *state, scale=scale, **sides))
        return tuple(torch.cat(of_all, dim=1)[0] for of_all in zip(*grads, strict=True))


@pytest.mark.parametrize("lengths", [LENGTHS, (1, 1, 1)], ids=["ragged", "single tokens"])
@pytest.mark.parametrize("window, sinks", WINDOWS)
def test_a_gpus_kernel_is_called_for_the_same_attention(monkeypatch, lengths, sinks, window):
    kernel = PackedFlashAttention(lengths)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", kernel.forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", kernel.backward)
    *given, of_sinks = (None if t is None else t.detach() for t in tensors(torch.float64, sinks, lengths=lengths))
    documents = Documents.of(lengths, CPU)
    rule = (documents.cu_seqlens, documents.max_seqlen, of_sinks, 0.3, window)
    (out, sums), wanted = packed._on_cuda(*given, *rule), packed._on_cpu(*given, *rule)
    for ours, right in zip((out, sums), wanted, strict=True):
        torch.testing.assert_close(ours, right, rtol=0, atol=1e-12)
    grad = torch.randn_like(out)
    found = packed._back_on_cuda(grad, *given, out, sums, *rule)
    for ours, right in zip(found, packed._back_on_cpu(grad, *given, *wanted, *rule), strict=True):
        torch.testing.assert_close(ours, right, rtol=0, atol=1e-11)
    assert kernel.calls == 2


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 4])
def test_torchs_own_operators_take_the_calls(sinks, window):
    """By their schema and shapes, on fake tensors: what comes out is what this module's operators declare."""
    with FakeTensorMode():
        query, key, value = (torch.empty(12, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
        places, of_sinks = torch.empty(4, dtype=torch.int32), torch.empty(4, dtype=torch.bfloat16) if sinks else None
        rule = (places, 9, of_sinks, 0.3, window)
        out, sums = packed._on_cuda(query, key, value, *rule)
        found = packed._back_on_cuda(out, query, key, value, out, sums, *rule)
        declared = packed._outputs(query), packed._gradients(out, query, key, value, out, sums, *rule)
    for ours, said in zip((out, sums, *found), (*declared[0], *declared[1]), strict=True):
        assert (ours.shape, ours.dtype, ours.stride()) == (said.shape, said.dtype, said.stride())


@pytest.mark.parametrize(
    "size, values, dtype, rule, dropout, serves",
    [
        (64, 64, torch.bfloat16, {}, 0.0, True),
        (64, 64, torch.bfloat16, {"window": 4}, 0.0, True),
        (64, 64, torch.float32, {}, 0.0, False),
        (60, 60, torch.bfloat16, {}, 0.0, False),
        (264, 264, torch.bfloat16, {}, 0.0, False),
        (192, 128, torch.bfloat16, {}, 0.0, False),  # latent attention
        (64, 64, torch.bfloat16, {"softcap": 50.0}, 0.0, False),
        (64, 64, torch.bfloat16, {}, 0.1, False),
    ],
)
def test_what_a_gpus_kernel_takes(size, values, dtype, rule, dropout, serves):
    query, value = (torch.empty(2, 1, n, dtype=dtype).as_subclass(OnGpu) for n in (size, values))
    assert has_packed_kernel(query, value, ScoreRule(1.0, **rule), dropout) == serves
