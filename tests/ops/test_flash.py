"""Attention with windows, sinks and fewer queries than keys: exact, and in memory that grows with the length.

The reference writes the scores out, in fp64. Memory is that of a real run on the CPU: bytes of all storages that are
alive at once, as torch's dispatcher sees them, forward and backward.
"""

import contextlib
import types

import pytest
import torch

from mrl.mcore_models import cpu_stand_in

cpu_stand_in.prepare()

from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from mrl.engine.peak_bytes import PeakBytes  # noqa: E402
from mrl.mcore_models import attention  # noqa: E402
from mrl.mcore_models.attention import PackedLayout, SdpaAttention, zigzag_inverse, zigzag_places  # noqa: E402
from mrl.ops import flash  # noqa: E402
from mrl.ops.masked import causal_mask  # noqa: E402

LONG = 2 * flash.BLOCK + 5
assert flash.BLOCK < flash.SHORT_TOKENS < LONG


def written_out(q, k, v, scale, window, sinks):
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(
        ~causal_mask(q.shape[2], k.shape[2], window, q.device), -torch.inf
    )
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], dim=-1)
    return scores.softmax(-1)[..., : k.shape[2]] @ v


@pytest.mark.parametrize("window, sinks", [(None, True), (1, False), (75, True), (LONG - 1, False)])
@pytest.mark.parametrize(
    "queries, keys", [(3, 9), (flash.BLOCK + 9, flash.SHORT_TOKENS), (LONG, LONG), (flash.BLOCK + 9, LONG)]
)
def test_outputs_and_gradients_are_exact(queries, keys, window, sinks):
    torch.manual_seed(0)
    long = keys > flash.BLOCK
    shapes = [(1 if long else 2, heads, n, size) for heads, n, size in ((4, queries, 8), (2, keys, 8), (2, keys, 4))]
    given = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    of_sinks = torch.randn(4, dtype=torch.float64, requires_grad=True) if sinks else None
    inputs = [*given, *([of_sinks] if sinks else [])]
    seen = None if window is None or window >= keys else window
    out = flash.attend(*given, scale=0.3, window=seen, sinks=of_sinks)
    wanted = written_out(*given, 0.3, window, of_sinks)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
    grad = torch.randn_like(out)
    for ours, theirs in zip(
        torch.autograd.grad(out, inputs, grad), torch.autograd.grad(wanted, inputs, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def core(*, window=None, sinks=False, cp=1, rank=0, heads=2, groups=1, size=8):
    config = TransformerConfig(
        num_layers=1, hidden_size=heads * size, num_attention_heads=heads, num_query_groups=groups,
        attention_dropout=0.0, window_size=None if window is None else (window - 1, 0),
        softmax_type="learnable" if sinks else "vanilla",
    )  # fmt: skip
    one = types.SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    group = types.SimpleNamespace(size=lambda: cp, rank=lambda: rank)
    return SdpaAttention(config, 1, pg_collection=types.SimpleNamespace(cp=group, tp=one))


def of_ranks(monkeypatch, whole, lengths, cp):
    """Queries, keys and values of each rank; gathering, which needs other processes, gives what those would send."""
    places = [zigzag_places(lengths, cp, rank) for rank in range(cp)]

    def gather(_, group):
        return torch.cat([torch.cat([t[at] for t in whole[1:]], dim=-1) for at in places]).squeeze(1)

    monkeypatch.setattr(attention, "gather_from_sequence_parallel_region", gather)
    return places, [[t[at] for t in whole] for at in places]


@pytest.mark.parametrize("cp, window, sinks", [(2, None, False), (3, 5, False), (3, None, True), (2, 5, True)])
def test_every_rank_has_its_part_of_the_whole(monkeypatch, cp, window, sinks):
    lengths = (2 * cp, 2 * cp, 10 * cp)
    torch.manual_seed(0)
    whole = [torch.randn(sum(lengths), 1, heads, 8) for heads in (2, 1, 1)]
    layout = PackedLayout.for_sequences(
        lengths, positions=torch.arange(sum(lengths)), order=zigzag_inverse(lengths, cp)
    )
    alone = core(window=window, sinks=sinks)
    wanted = alone(*whole, packed_seq_params=layout)
    places, ranks = of_ranks(monkeypatch, whole, lengths, cp)
    for rank, (at, given) in enumerate(zip(places, ranks, strict=True)):
        out = core(window=window, sinks=sinks, cp=cp, rank=rank)(*given, packed_seq_params=layout)
        torch.testing.assert_close(out, wanted[at], rtol=0, atol=2e-6)


def peak(monkeypatch, length, cp, **options):
    whole = [torch.randn(length, 1, heads, 8, requires_grad=True) for heads in (2, 1, 1)]
    _, ranks = of_ranks(monkeypatch, [t.detach() for t in whole], (length,), cp)
    layout = PackedLayout.for_sequences((length,), positions=torch.arange(length), order=zigzag_inverse((length,), cp))
    given = [t.requires_grad_() for t in ranks[0]] if cp > 1 else whole
    module = core(cp=cp, **options)
    with PeakBytes() as memory:
        module(*given, packed_seq_params=layout).sum().backward()
    return memory.peak


@pytest.mark.parametrize(
    "options", [{"cp": 2}, {"window": 64}, {"sinks": True, "window": 700}],
    ids=lambda options: " ".join(f"{k} {v}" for k, v in options.items()),
)  # fmt: skip
def test_memory_grows_with_the_length(monkeypatch, options):
    """Twice the tokens take at most 2.3 times the bytes; scores, or a mask of all of them, take four times."""
    options = {"cp": 1} | options
    short, long = (peak(monkeypatch, length, **options) for length in (2048, 4096))
    assert long < 2.3 * short, f"{short / 2**20:.1f} MiB at 2048 tokens, {long / 2**20:.1f} MiB at 4096"


# -- calls of CUDA's kernels -------------------------------------------------------------------------------------------


class OnGpu(torch.Tensor):
    """Says that it is on a GPU; its values are on the CPU, and so is what is computed of it."""

    is_cpu, is_cuda = False, True


class FlashAttention:
    """flash-attn as torch calls it, written out: [N, L, heads, D], queries at the end of the keys, windows by their sides,
    and a backward pass that takes the logarithm of the sums as it is given. Head sizes are multiples of 8."""

    state = torch.zeros(2), torch.ones(1)

    @staticmethod
    def scores(q, k, causal, scale, left, right):
        assert q.shape[-1] == k.shape[-1] and q.shape[-1] % 8 == 0
        q, k = (t.transpose(1, 2).as_subclass(torch.Tensor) for t in (q, k))
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        queries, keys = q.shape[2], k.shape[2]
        back = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
        right = 0 if causal else right
        hidden = (back > (keys if left < 0 else left)) | (back < -(queries if right < 0 else right))
        return (q @ k.transpose(-1, -2) * scale).masked_fill(hidden, -torch.inf)

    def forward(self, q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *, scale, window_size_left=-1,
                window_size_right=-1):  # fmt: skip
        assert (cum_q, cum_k, max_q, max_k, dropout, debug) == (None, None, q.shape[1], k.shape[1], 0.0, False)
        scores = self.scores(q, k, causal, scale, window_size_left, window_size_right)
        value = v.as_subclass(torch.Tensor).transpose(1, 2).repeat_interleave(q.shape[2] // v.shape[2], dim=1)
        return (scores.softmax(-1) @ value).transpose(1, 2), scores.logsumexp(-1), *self.state, torch.zeros(0)

    def backward(self, grad, q, k, v, out, sums, cum_q, cum_k, max_q, max_k, dropout, causal, *state, scale,
                 window_size_left=-1, window_size_right=-1):  # fmt: skip
        assert (cum_q, cum_k, max_q, max_k, dropout) == (None, None, q.shape[1], k.shape[1], 0.0)
        assert [s is t for s, t in zip(state, self.state, strict=True)] == [True, True]
        groups = q.shape[2] // k.shape[2]
        shares = (self.scores(q, k, causal, scale, window_size_left, window_size_right) - sums[..., None]).exp()
        grad, q, k, v, out = (t.as_subclass(torch.Tensor).transpose(1, 2) for t in (grad, q, k, v, out))
        k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
        of_scores = shares * (grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)) * scale
        grads = of_scores @ k, of_scores.transpose(-1, -2) @ q, shares.transpose(-1, -2) @ grad
        return tuple(
            (t if i == 0 else t.unflatten(1, (-1, groups)).sum(2)).transpose(1, 2) for i, t in enumerate(grads)
        )


@pytest.mark.parametrize("window, sinks", [(None, True), (1, False), (4, True), (4, False)])
@pytest.mark.parametrize("size, values", [(8, 8), (12, 6)])
def test_a_gpus_kernel_is_called_for_the_same_attention(monkeypatch, window, sinks, size, values):
    torch.manual_seed(0)
    kernel = FlashAttention()
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", kernel.forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", kernel.backward)
    shapes = [(2, heads, n, last) for heads, n, last in ((4, 5, size), (2, 9, size), (2, 9, values))]
    given = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    of_sinks = torch.randn(4, dtype=torch.float64, requires_grad=True) if sinks else None
    inputs = [*given, *([of_sinks] if sinks else [])]
    out = flash.attend(*(t.as_subclass(OnGpu) for t in given), scale=0.3, window=window, sinks=of_sinks)
    wanted = written_out(*given, 0.3, window, of_sinks)
    torch.testing.assert_close(out.as_subclass(torch.Tensor), wanted, rtol=0, atol=1e-12)
    grad = torch.randn_like(wanted)
    for ours, theirs in zip(
        torch.autograd.grad(out, inputs, grad), torch.autograd.grad(wanted, inputs, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [None, 5])
def test_heads_of_a_group_are_neighbours_where_a_gpu_has_no_kernel(monkeypatch, window):
    """In fp32: keys and values are written out for each query head."""
    torch.manual_seed(0)
    whole = [torch.randn(12, 1, heads, 8) for heads in (4, 2, 2)]
    layout = PackedLayout.for_sequences((12,), positions=torch.arange(12))
    module = core(window=window, heads=4, groups=2)
    wanted = module(*whole, packed_seq_params=layout)
    grouped = []
    real = torch.nn.functional.scaled_dot_product_attention

    def call(*args, enable_gqa, **options):
        grouped.append(enable_gqa)
        return real(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", call)
    out = module(*(t.as_subclass(OnGpu) for t in whole), packed_seq_params=layout)
    assert grouped == [False]
    torch.testing.assert_close(out.as_subclass(torch.Tensor), wanted, rtol=0, atol=1e-6)


def test_dropout_is_that_of_windowed_layers_too(monkeypatch):
    tracker = types.SimpleNamespace(fork=contextlib.nullcontext)
    monkeypatch.setattr(attention, "get_cuda_rng_tracker", lambda: tracker)
    whole = [torch.ones(12, 1, heads, 8) for heads in (2, 1, 1)]
    layout = PackedLayout.for_sequences((12,), positions=torch.arange(12))
    for window in (None, 5):
        module = core(window=window)
        module.dropout = 0.5
        dropped = module(*whole, packed_seq_params=layout)
        module.eval()
        assert not torch.equal(dropped, module(*whole, packed_seq_params=layout))
