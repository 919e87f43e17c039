"""Attention with windows, sinks and fewer queries than keys: exact, and in memory that grows with the length.

The reference writes the scores out, in fp64. Memory is that of a real run on the CPU: bytes of all storages that are
alive at once, as torch's dispatcher sees them, forward and backward.
"""

import types
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mrl.mcore_models import cpu_stand_in

cpu_stand_in.prepare()

from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from mrl.mcore_models import attention, flash  # noqa: E402
from mrl.mcore_models.attention import PackedLayout, SdpaAttention, zigzag_inverse, zigzag_places  # noqa: E402
from mrl.mcore_models.kv_cache import causal_mask  # noqa: E402

LONG = 2 * flash.BLOCK + 5


def written_out(q, k, v, scale, window, sinks):
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(
        ~causal_mask(q.shape[2], k.shape[2], window, q.device), -torch.inf
    )
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], dim=-1)
    return scores.softmax(-1)[..., : k.shape[2]] @ v


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 300, LONG - 1])
@pytest.mark.parametrize("queries, keys", [(5, 5), (3, 9), (LONG, LONG), (flash.BLOCK + 9, LONG)])
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


def core(monkeypatch, *, window=None, sinks=False, cp=1, rank=0, heads=2, groups=1, size=8):
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


@pytest.mark.parametrize("cp", [2, 3])
@pytest.mark.parametrize("window, sinks", [(None, False), (5, False), (None, True), (5, True)])
def test_every_rank_has_its_part_of_the_whole(monkeypatch, cp, window, sinks):
    lengths = (2 * cp, 2 * cp, 10 * cp)
    torch.manual_seed(0)
    whole = [torch.randn(sum(lengths), 1, heads, 8) for heads in (2, 1, 1)]
    layout = PackedLayout.make(lengths, positions=torch.arange(sum(lengths)), order=zigzag_inverse(lengths, cp))
    alone = core(monkeypatch, window=window, sinks=sinks)
    wanted = alone(*whole, packed_seq_params=layout)
    places, ranks = of_ranks(monkeypatch, whole, lengths, cp)
    for rank, (at, given) in enumerate(zip(places, ranks, strict=True)):
        out = core(monkeypatch, window=window, sinks=sinks, cp=cp, rank=rank)(*given, packed_seq_params=layout)
        torch.testing.assert_close(out, wanted[at], rtol=0, atol=2e-6)


class Alive(TorchDispatchMode):
    """The most bytes of storages that were alive at once."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.known = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.known:
                    self.known[storage._cdata] = weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
        return out

    def gone(self, key, size):
        del self.known[key]
        self.now -= size


def peak(monkeypatch, length, cp, **options):
    whole = [torch.randn(length, 1, heads, 8, requires_grad=True) for heads in (2, 1, 1)]
    _, ranks = of_ranks(monkeypatch, [t.detach() for t in whole], (length,), cp)
    layout = PackedLayout.make((length,), positions=torch.arange(length), order=zigzag_inverse((length,), cp))
    given = [t.requires_grad_() for t in ranks[0]] if cp > 1 else whole
    module = core(monkeypatch, cp=cp, **options)
    with Alive() as alive:
        module(*given, packed_seq_params=layout).sum().backward()
    return alive.peak


@pytest.mark.parametrize(
    "options", [{"cp": 2}, {"window": 64}, {"window": 64, "cp": 2}, {"sinks": True}, {"sinks": True, "window": 700}],
    ids=lambda options: " ".join(f"{k} {v}" for k, v in options.items()),
)  # fmt: skip
def test_memory_grows_with_the_length(monkeypatch, options):
    """Twice the tokens take at most 2.3 times the bytes; scores, or a mask of all of them, take four times."""
    options = {"cp": 1} | options
    short, long = (peak(monkeypatch, length, **options) for length in (2048, 4096))
    assert long < 2.3 * short, f"{short / 2**20:.1f} MiB at 2048 tokens, {long / 2**20:.1f} MiB at 4096"
