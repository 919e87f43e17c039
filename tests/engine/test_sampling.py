"""The choice of a token: its noise, its filters against transformers' own, its frequencies, and vocabularies in shards.

The oracle of the noise is SplitMix64 in plain integers, below, with its published first numbers. Sampling by an engine is in
test_generation.py.
"""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from mrl.engine import sampling
from mrl.engine.logprobs import VocabShard
from mrl.engine.peak_bytes import PeakBytes
from mrl.engine.sampling import (
    GREEDY,
    SamplingKey,
    SamplingParams,
    SamplingRows,
    choose,
    choose_among,
    gumbel,
    key_hash,
    lower_bound,
    noise_key,
    noise_keys,
    random_bits,
)
from mrl.engine.splitmix import to_int64
from tests.engine.harness import run_case

CPU = torch.device("cpu")
FILTERS = [
    SamplingParams(),
    SamplingParams(0.7),
    SamplingParams(1.3, top_k=5),
    SamplingParams(1.0, top_k=500),
    SamplingParams(0.8, top_p=0.9),
    SamplingParams(1.0, top_p=0.05),
    SamplingParams(2.0, min_p=0.1),
    SamplingParams(0.9, top_k=40, top_p=0.8, min_p=0.02),
    SamplingParams(3.0, top_k=300, top_p=0.99),
    SamplingParams(50.0, top_p=0.97),  # nearly flat: candidates must grow
    GREEDY,
]


def splitmix64(state):
    """The first number of the generator with this state (Steele, Lea and Flood, 2014; Vigna's reference code)."""
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def rows_of(params, keys):
    return SamplingRows.of(params, [noise_key(key, 0) for key in keys], CPU)


# -- noise -------------------------------------------------------------------------------------------------------------


def test_bits_are_splitmix64_whatever_part_is_asked_for():
    assert splitmix64(1234567) == 6457827717110365317  # published
    keys = [noise_key((1, 2, 3, s), 4) for s in range(3)]
    words = [[splitmix64((key + w * 0x9E3779B97F4A7C15) % 2**64) for w in range(12)] for key in keys]
    expected = [[half for word in row for half in (word % 2**32, word >> 32)] for row in words]
    tensor = torch.tensor([to_int64(key) for key in keys])
    for start, count in ((0, 24), (0, 7), (5, 8), (6, 1), (7, 16), (3, 0)):
        bits = random_bits(tensor, start, count)
        assert (bits.long() % 2**32).tolist() == [row[start : start + count] for row in expected]
    whole = gumbel(tensor, 0, 24)
    assert torch.equal(gumbel(tensor, 5, 8), whole[:, 5:13]) and torch.equal(gumbel(tensor[1:2], 0, 24), whole[1:2])
    u = [[-math.log1p(-((bits % 2**31) + 0.5) / 2**31) for bits in row] for row in expected]
    torch.testing.assert_close(whole, -torch.tensor(u).log(), rtol=1e-6, atol=1e-6)


def test_every_part_of_a_key_counts():
    parts = [(a, b, c, d, t) for a in range(3) for b in range(3) for c in range(3) for d in range(3) for t in range(3)]
    assert len({noise_key(part[:4], part[4]) for part in parts}) == 3**5
    assert noise_key(SamplingKey(1, 2, 3, 4), 5) == noise_key((1, 2, 3, 4), 5)


def test_keys_of_a_step_are_those_of_each_sequence():
    keys = [SamplingKey(s, 2**40, 2**63 + s, s) for s in range(5)]
    found = noise_keys(torch.tensor([to_int64(key_hash(key)) for key in keys]), range(95, 100))
    assert found.tolist() == [to_int64(noise_key(key, 95 + i)) for i, key in enumerate(keys)]


@pytest.mark.parametrize("rows, count, start", [(300, 1000, 3), (5, 65537, 1), (3, 0, 0)])
def test_noise_is_the_same_in_any_chunks(monkeypatch, rows, count, start):
    keys = torch.randint(-(2**62), 2**62, (rows,))
    found = gumbel(keys, start, count)
    for words in (2**9, 2**28):
        monkeypatch.setattr(sampling, "_NOISE_WORDS_ON_CPU", words)
        assert torch.equal(gumbel(keys, start, count), found)


class Operations(TorchDispatchMode):
    """Counts what is dispatched."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "params, most",
    [(SamplingParams(), 60), (SamplingParams(0.7), 60), (SamplingParams(top_k=20), 100), (SamplingParams(top_p=0.9), 100),
     (SamplingParams(0.7, top_p=0.9), 100)],
)  # fmt: skip
def test_off_a_cpu_operations_do_not_grow_with_rows_or_vocabulary(params, most):
    """Tensors on "meta" have no memory, and operations are those of a GPU without Triton."""
    meta, counts = torch.device("meta"), set()
    for count, vocab in ((1, 151936), (1024, 151936), (1024, 7), (1700, 151936)):
        rows = SamplingRows.of([params] * count, [0] * count, meta)
        logits = torch.empty(count, vocab, dtype=torch.bfloat16, device=meta)
        with Operations() as operations:
            choose_among(logits, rows, VocabShard(vocab), rows.candidates)
        counts.add(operations.count)
    assert len(counts) == 1 and max(counts) <= most


@pytest.mark.parametrize("rows, vocab", [(16384, 151936), (3, 2**29)])
def test_noise_takes_four_gib_beside_itself(rows, vocab):
    keys = torch.empty(rows, dtype=torch.int64, device="meta")
    with PeakBytes() as found:
        gumbel(keys, 1, vocab)
    assert found.peak - 4 * rows * vocab <= 2**32 + 16 * (vocab + rows)


def chi_square(counts):
    """Standard deviations that the chi-square of counts of equal probability is from its mean."""
    expected = counts.double().mean()
    cells = counts.numel() - 1
    return float((((counts - expected) ** 2 / expected).sum() - cells) / (2 * cells) ** 0.5)


@pytest.mark.parametrize("axis", ["vocabulary", "position", "sample", "prompt", "step", "seed"])
def test_noise_is_uniform_and_independent_along_every_axis(axis):
    """Bits, uniforms and pairs of neighbours, over 2^16 numbers along one axis of the key with the others fixed."""
    count = 2**16
    if axis == "vocabulary":
        bits = random_bits(torch.tensor([to_int64(noise_key((0, 0, 0, 0), 0))]), 0, count)[0]
    else:
        at = ("seed", "step", "prompt", "sample", "position").index(axis)
        keys = [noise_key(*((k[:4], k[4]))) for k in ([i if j == at else 7 for j in range(5)] for i in range(count))]
        bits = random_bits(torch.tensor([to_int64(key) for key in keys]), 10, 1)[:, 0]
    bits = bits.long() % 2**31
    ones = torch.stack([(bits >> b & 1).sum() for b in range(31)]).double()
    assert ((ones - count / 2) / (count / 4) ** 0.5).abs().max() < 4.5
    cell = bits >> 23  # 256 cells
    assert abs(chi_square(torch.bincount(cell, minlength=256))) < 4.5
    for lag in (1, 2, 32):
        pairs = (bits[:-lag] >> 26) * 32 + (bits[lag:] >> 26)
        assert abs(chi_square(torch.bincount(pairs, minlength=1024))) < 4.5


# -- one process -------------------------------------------------------------------------------------------------------


def transformers_logits(logits, params):
    """What transformers would draw from: -inf where a filter drops a token."""
    if params.greedy:
        return logits
    warpers = [TemperatureLogitsWarper(params.temperature)]
    warpers += [TopKLogitsWarper(params.top_k)] if params.top_k else []
    warpers += [TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
    warpers += [MinPLogitsWarper(params.min_p)] if params.min_p else []
    for warper in warpers:
        logits = warper(None, logits)
    return logits


def batch_of_logits(vocab, seed=0, sequences=4):
    """[S * filters, vocab] with the parameters and keys of each row."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(sequences * len(FILTERS), vocab, generator=generator) * 3
    params = FILTERS * sequences
    return logits, params, [SamplingKey(seed, 1, 2, i) for i in range(len(params))]


@pytest.mark.parametrize(("vocab", "seed"), [(7, 0), (131, 1), (1500, 2), (131, 3), (7, 4)])
def test_choice_is_the_argmax_of_what_transformers_keeps_plus_noise(vocab, seed):
    logits, params, keys = batch_of_logits(vocab, seed)
    rows = rows_of(params, keys)
    tokens, log_probs = choose(logits, rows, VocabShard(vocab))
    scaled = torch.stack([row / (p.temperature or 1.0) for row, p in zip(logits, params, strict=True)])
    above = scaled >= lower_bound(scaled, rows, None, columns=vocab, count=vocab)[0][:, None]
    noise = gumbel(torch.tensor([to_int64(noise_key(key, 0)) for key in keys]), 0, vocab)
    for i, p in enumerate(params):
        kept = transformers_logits(logits[i : i + 1].clone(), p)[0]
        assert torch.equal(above[i], kept.isfinite()), p
        assert tokens[i] == (kept if p.greedy else kept + noise[i]).argmax(), p
        # trap 19: the temperature is in the log-probs; the filters are not
        log_p = torch.log_softmax(logits[i].double() / (p.temperature or 1.0), -1)
        assert abs(log_p[tokens[i]] - log_probs[i]) < 1e-5
    for i in range(0, len(params), 7):  # alone as in company
        token, log_prob = choose(logits[i : i + 1], rows_of(params[i : i + 1], keys[i : i + 1]), VocabShard(vocab))
        assert token == tokens[i] and log_prob == log_probs[i]


def test_ties_with_a_bound_are_kept_and_padding_is_never_chosen():
    logits = torch.zeros(400, 20)
    logits[:, 16:] = 50.0  # padded columns
    for params in (SamplingParams(top_k=3), SamplingParams(top_p=0.5), SamplingParams(min_p=1.0)):
        rows = rows_of([params] * 400, [(0, 0, 0, s) for s in range(400)])
        assert set(choose(logits, rows, VocabShard(16))[0].tolist()) == set(range(16))
    assert choose(logits[:2], rows_of([GREEDY] * 2, [()] * 2), VocabShard(16))[0].tolist() == [0, 0]


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(0.5), SamplingParams(1.5, top_k=4, top_p=0.9)])
def test_frequencies_are_the_probabilities(params):
    """20,000 draws from a vocabulary of 8 over two positions' worth of samples."""
    count, logits = 20000, torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0])
    tokens, _ = choose(
        logits.expand(count, 8),
        rows_of([params] * count, [(5, 0, i // 50, i % 50) for i in range(count)]),
        VocabShard(8),
    )
    wanted = transformers_logits(logits[None].clone(), params)[0].softmax(-1) * count
    counts = torch.bincount(tokens, minlength=8)
    assert (counts[wanted == 0] == 0).all()
    counts, wanted = counts[wanted > 0], wanted[wanted > 0]
    cells = len(wanted) - 1
    assert ((counts - wanted) ** 2 / wanted).sum() < cells + 4.5 * (2 * cells) ** 0.5


# -- shards of a vocabulary --------------------------------------------------------------------------------------------


def shards_choose_what_one_process_chooses():
    """In a world: each rank has its columns, the last ones padding (with three ranks, one has nothing else)."""
    import torch.distributed as dist

    ranks, rank = dist.get_world_size(), dist.get_rank()
    for vocab, columns in ((131, -(-131 // ranks)), (6, 4), (1500, 1024)):
        logits, params, keys = batch_of_logits(vocab)
        expected = choose(logits, rows_of(params, keys), VocabShard(vocab))
        padded = torch.full((len(logits), max(ranks * columns, vocab)), 99.0)
        padded[:, :vocab] = logits
        if ranks * columns < vocab:
            continue
        part = padded[:, rank * columns : (rank + 1) * columns]
        shard = VocabShard(vocab, rank * columns, dist.group.WORLD)
        for lines in (slice(None), slice(0, 1), slice(4, 5), slice(9, 10), slice(10, 11)):
            tokens, log_probs = choose(part[lines], rows_of(params[lines], keys[lines]), shard)
            assert torch.equal(tokens, expected[0][lines])
            torch.testing.assert_close(log_probs, expected[1][lines], rtol=0, atol=1e-6)


@pytest.mark.parametrize("ranks", [2, 3])
def test_shards(ranks):
    run_case(ranks, "tests.engine.test_sampling:shards_choose_what_one_process_chooses")
