"""Core attention and norms on one process: packed, cached and windowed, against softmax(q k^T) v written out.

Dimensions as in mrl/mcore_models/attention.py. Context parallelism is in the parity table (tests/engine/parity_rows.py).
"""

import collections
import random
import types

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from mrl.mcore_models import cpu_stand_in

cpu_stand_in.prepare()

from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from mrl.mcore_models.attention import (  # noqa: E402
    CacheLayout,
    PackedLayout,
    SdpaAttention,
    zigzag_inverse,
    zigzag_places,
)
from mrl.mcore_models.layers import RMSNorm  # noqa: E402
from mrl.ops.kv_cache import CachedStep, KVCache  # noqa: E402
from mrl.ops.masked import causal_mask  # noqa: E402
from tests.operators import Operators  # noqa: E402

H, G, D = 4, 2, 8
ALONE = types.SimpleNamespace(cp=types.SimpleNamespace(size=lambda: 1, rank=lambda: 0))
LENGTHS = (5, 5, 1, 9, 3)


def attention(window=None, windowed_layers=None, layer=1):
    config = TransformerConfig(
        num_layers=2, hidden_size=H * D, num_attention_heads=H, num_query_groups=G, attention_dropout=0.0,
        window_size=None if window is None else (window - 1, 0), window_attn_skip_freq=windowed_layers,
    )  # fmt: skip
    return SdpaAttention(config, layer, pg_collection=ALONE)


def tokens(lengths=LENGTHS, seed=0):
    """q [T, 1, H, D], k and v [T, 1, G, D]."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(sum(lengths), 1, heads, D, generator=generator) for heads in (H, G, G))


def written_out(q, k, v, window=None):
    """[L, H*D] of one sequence: q [L, H, D], k and v [L, G, D], in fp64."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(H // G, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / D**0.5
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))[None]
    seen = (distance >= 0) & (distance < (window or len(q)))
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1).float()


def expected(q, k, v, lengths=LENGTHS, window=None):
    split = zip(*(t.squeeze(1).split(list(lengths)) for t in (q, k, v)), strict=True)
    return torch.cat([written_out(*one, window) for one in split])


def close(actual, wanted):
    torch.testing.assert_close(actual, wanted, rtol=0, atol=2e-6)


@pytest.mark.parametrize("window", [None, 1, 4, 5, 100])  # of 5 tokens: shorter by one, and all
def test_packed_sequences_see_themselves_only(window):
    q, k, v = tokens()
    layout = PackedLayout.for_sequences(LENGTHS, positions=torch.cat([torch.arange(n) for n in LENGTHS]))
    assert layout.runs == [(0, 2, 5), (10, 1, 1), (11, 1, 9), (20, 1, 3)]
    out = attention(window)(q, k, v, packed_seq_params=layout)
    assert out.shape == (sum(LENGTHS), 1, H * D)
    close(out.squeeze(1), expected(q, k, v, window=window))


def test_a_window_counts_in_its_layers_only():
    q, k, v = tokens((9,))
    layout = PackedLayout.for_sequences((9,), positions=torch.arange(9))
    for layer, window in ((1, None), (2, 3)):
        out = attention(3, windowed_layers=[0, 1], layer=layer)(q, k, v, packed_seq_params=layout)
        close(out.squeeze(1), expected(q, k, v, (9,), window))


def cached(core, cache, q, k, v, old, new, extra=0):
    """One forward of `new` tokens a sequence after `old` ones, with `extra` places of padding behind them."""
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    at = torch.cat([torch.arange(s + o, s + o + n) for s, o, n in zip(starts, old, new, strict=False)])
    parts = [torch.cat([t[at], torch.full_like(t[:extra], 7.0)]) for t in (q, k, v)]
    layout = CacheLayout.make(CachedStep(cache, tuple(new), tuple(old), q.device), extra)
    assert layout.positions.tolist() == [o + i for n, o in zip(new, old, strict=True) for i in range(n)] + [0] * extra
    out = core(*parts, packed_seq_params=layout).squeeze(1)
    assert out.shape[0] == len(at) + extra
    return at, out[: len(at)]


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("extra", [0, 2])
def test_the_cache_gives_what_the_whole_sequence_gives(window, extra):
    """A prompt in one piece, then in another, then token by token; sequences of unequal length, padding behind."""
    q, k, v = tokens()
    whole = expected(q, k, v, window=window)
    core, cache = attention(window), KVCache(len(LENGTHS), max(LENGTHS))
    old = [0] * len(LENGTHS)
    new = [2, 1, 1, 4, 1]
    for _ in range(2):
        at, out = cached(core, cache, q, k, v, old, new, extra)
        close(out, whole[at])
        old = [o + n for o, n in zip(old, new, strict=True)]
        new = [min(2, length - o) for o, length in zip(old, LENGTHS, strict=True)]
    core, cache = attention(window), KVCache(len(LENGTHS), max(LENGTHS))
    prompts = [1, 2, 1, 3, 1]
    cached(core, cache, q, k, v, [0] * 5, prompts)
    # sequences that are done go on with their last token in place, as in generation, and are not looked at
    for step in range(max(LENGTHS)):
        old = [min(p + step, length - 1) for p, length in zip(prompts, LENGTHS, strict=True)]
        at, out = cached(core, cache, q, k, v, old, [1] * 5, extra)
        close(out, whole[at])


def test_masks_are_aligned_to_the_end_of_the_keys():
    assert causal_mask(2, 4, None, torch.device("cpu")).tolist() == [[True, True, True, False], [True] * 4]
    assert causal_mask(2, 4, 2, torch.device("cpu")).tolist() == [
        [False, True, True, False],
        [False, False, True, True],
    ]


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_zigzag_inverse_undoes_the_places(cp):
    lengths = (2 * cp, 8 * cp, 4 * cp)
    places = torch.cat([zigzag_places(lengths, cp, r) for r in range(cp)])
    assert sorted(places.tolist()) == list(range(sum(lengths)))
    assert torch.equal(places[zigzag_inverse(lengths, cp)], torch.arange(sum(lengths)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_that_of_transformers(dtype):
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, params_dtype=dtype)
    ours, theirs = RMSNorm(config, 32, eps=1e-5), LlamaRMSNorm(32, eps=1e-5).to(dtype)
    assert ours.weight.dtype == dtype and ours.weight.sequence_parallel is False
    with torch.no_grad():
        ours.weight.copy_(torch.randn(32))
        theirs.weight.copy_(ours.weight)
    x = torch.randn(7, 1, 32).to(dtype)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-6 if dtype == torch.float32 else 0)


@pytest.mark.parametrize("seed", range(4))
def test_copies_in_batches_are_copies_in_order(seed):
    """Rows move, are copied to several others and move on; each then begins as it would by one copy after another."""
    rows, length, generator = 12, 9, random.Random(seed)
    cache, expected, places = KVCache(rows, length), {}, [length] * rows
    for layer in range(2):
        pair = cache.of_layer(layer, torch.zeros(1, 2, 4), torch.zeros(1, 2, 3))
        for tensor in pair:
            tensor.copy_(torch.randn(tensor.shape))
        expected[layer] = [tensor.clone() for tensor in pair]
    states = cache.states_of(2, torch.zeros(3), torch.zeros(2, 2))
    for state in states:
        state.copy_(torch.randn(state.shape))
    of_states = [state.clone() for state in states]
    copies = []
    for _ in range(30):
        source, target = generator.randrange(rows), generator.randrange(rows)
        count = generator.randint(1, places[source])
        copies.append((source, target, count))
        places[target] = count
        for pair in expected.values():
            for tensor in pair:
                tensor[target, :, :count] = tensor[source, :, :count].clone()
        for state in of_states:
            state[target] = state[source]
    with Operators() as operators:
        cache.arrange(copies, (rows - 1, length + 2) if seed % 2 else None)
    made = collections.Counter(func._overloadpacket.__name__ for func, _ in operators.calls)
    assert (made["index"], made["index_put_"]) == (6, 6), "of each tensor, however many copies there are"
    for layer, pair in cache.layers.items():
        for found, wanted in zip(pair, expected[layer], strict=True):
            for row in range(rows - seed % 2):
                assert torch.equal(found[row, :, : places[row]], wanted[row, :, : places[row]])
    assert all(torch.equal(*pair) for pair in zip(cache.states[2], (s[: cache.rows] for s in of_states), strict=True))
