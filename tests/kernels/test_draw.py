"""The kernel that draws a token against mrl's torch code, which chooses the same tokens.

On a GPU the kernel calls CUDA's own logarithms, as torch's kernels do, and divides as they do. The interpreter has
numpy's. So here a score may differ by a unit in the last place, and a token only where two scores are that near.
"""

from __future__ import annotations

import pytest
import torch

from mrl.engine.logprobs import VocabShard
from mrl.engine.sampling import GREEDY, SamplingParams, SamplingRows, choose, gumbel
from mrl.kernels import head, operators
from tests.engine.harness import run_case

KINDS = [
    SamplingParams(), SamplingParams(0.7), SamplingParams(1.3, top_k=5), SamplingParams(0.8, top_p=0.9),
    SamplingParams(2.0, min_p=0.1), SamplingParams(0.9, top_k=40, top_p=0.8, min_p=0.02),
    SamplingParams(50.0, top_p=0.97), GREEDY,
]  # fmt: skip


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks of columns in a small vocabulary."""
    from mrl.kernels import head_launchers

    monkeypatch.setattr(head_launchers, "DRAW_BLOCK", 128)


def logits_of(rows, columns, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    return (torch.randn(rows, columns, generator=generator) * 3).to(dtype), keys


def both(logits, params, keys, shard):
    """Returns (tokens, log-probs) by the kernel, and by torch's operators."""
    rows = SamplingRows.of(params, keys, logits.device)
    found = choose(logits, rows, shard)
    with operators.interpreted(False):
        return found, choose(logits, rows, shard)


def check(logits, params, keys, shard):
    (tokens, log_probs), (expected, theirs) = both(logits, params, keys, shard)
    assert tokens.dtype == expected.dtype and torch.equal(tokens, expected)
    exact = torch.stack(
        [
            (row[: shard.vocab_size].double() / (p.temperature or 1.0)).log_softmax(-1)
            for row, p in zip(logits, params, strict=True)
        ]
    ).gather(1, tokens[:, None])[:, 0]
    assert log_probs.dtype == theirs.dtype and (log_probs - exact).abs().max() < 4e-6
    torch.testing.assert_close(log_probs, theirs, rtol=0, atol=4e-6)


@pytest.mark.parametrize(
    "kinds, dtype",
    [(KINDS[:2], torch.bfloat16), ([GREEDY], torch.float32), (KINDS, torch.float32)],
    ids=["without filters", "greedy", "all"],
)
def test_tokens_are_those_of_torch(small_blocks, kinds, dtype):
    params = kinds * (32 // len(kinds))
    logits, keys = logits_of(len(params), 300, dtype)
    check(logits, params, keys, VocabShard(300))


@pytest.mark.parametrize("columns, vocab", [(1, 1), (7, 7), (129, 128), (300, 257)])
def test_rows_of_all_kinds_at_once_and_odd_sizes(small_blocks, columns, vocab):
    """Padded columns hold the largest logits, and are never chosen."""
    logits, keys = logits_of(2 * len(KINDS), columns, seed=1)
    logits[:, vocab:] = 99.0
    check(logits, KINDS * 2, keys, VocabShard(vocab))


def test_a_large_vocabulary_in_whole_blocks():
    logits, keys = logits_of(3, 70001, torch.bfloat16)
    check(logits, [SamplingParams(0.9)] * 3, keys, VocabShard(70001))


def test_one_row_and_none():
    logits, keys = logits_of(1, 50)
    check(logits, KINDS[:1], keys, VocabShard(50))
    tokens, log_probs = choose(logits[:0], SamplingRows.of([], keys[:0], logits.device), VocabShard(50))
    assert tokens.shape == log_probs.shape == (0,)


def test_the_largest_noise_is_that_of_torch():
    """Of 2**16 numbers a row. They come from uniform ones near 0, where 1 - w loses digits."""
    _, keys = logits_of(8, 1, seed=3)
    found, token, *_ = head.draw(torch.zeros(8, 2**16), 0, keys, None, None, None)
    expected = gumbel(keys, 0, 2**16).max(dim=1)
    assert expected.values.max() > 13 and torch.equal(token.long(), expected.indices)
    torch.testing.assert_close(found.float(), expected.values, rtol=3e-7, atol=0)


def test_ties_take_the_lowest_id(small_blocks):
    logits = torch.zeros(2, 300)
    logits[:, [140, 290]] = 1.0
    (tokens, _), _ = both(logits, [GREEDY] * 2, [0, 0], VocabShard(300))
    assert tokens.tolist() == [140, 140]


def test_columns_of_minus_infinity_are_never_chosen(small_blocks):
    logits, keys = logits_of(20, 300, seed=2)
    logits[:, :130] = logits[:, 140:] = -torch.inf
    check(logits, [SamplingParams(0.7)] * 20, keys, VocabShard(300))


def test_a_row_is_the_same_alone_and_each_time(small_blocks):
    logits, keys = logits_of(8, 300)
    rows = SamplingRows.of([SamplingParams(0.7)] * 8, keys, logits.device)
    found = head.draw(logits, 0, keys, None, rows.temperature, None)
    for i in range(8):
        own = head.draw(logits[i : i + 1], 0, keys[i : i + 1], None, rows.temperature[:1], None)
        assert torch.equal(own[:, 0], found[:, i])


def test_other_dtypes_run_torchs_operators():
    assert operators.supports(torch.zeros(1, 1)) and not operators.supports(torch.zeros(1, 1, dtype=torch.float64))


def shards_choose_what_one_process_chooses():
    import torch.distributed as dist

    ranks, rank = dist.get_world_size(), dist.get_rank()
    with operators.interpreted():
        for vocab, columns in ((131, 66), (40, 64)):  # rank 1 has nothing but padding in the second
            logits, keys = logits_of(2 * len(KINDS), ranks * columns)
            rows = SamplingRows.of(KINDS * 2, keys, logits.device)
            expected = choose(logits, rows, VocabShard(vocab))
            part = logits[:, rank * columns : (rank + 1) * columns]
            tokens, log_probs = choose(part, rows, VocabShard(vocab, rank * columns, dist.group.WORLD))
            assert torch.equal(tokens, expected[0])
            torch.testing.assert_close(log_probs, expected[1], rtol=0, atol=4e-6)
            plain = KINDS[:2]  # without filters the kernel has the logits as they are
            rows = SamplingRows.of(plain, keys[:2], logits.device)
            tokens, _ = choose(part[:2], rows, VocabShard(vocab, rank * columns, dist.group.WORLD))
            assert torch.equal(tokens, choose(logits[:2], rows, VocabShard(vocab))[0])


def test_shards():
    run_case(2, "tests.kernels.test_draw:shards_choose_what_one_process_chooses")


def test_constants_are_those_of_splitmix():
    from mrl.engine import splitmix
    from mrl.kernels import head_launchers as kernel

    signed = [splitmix.to_int64(word) for word in (splitmix.GAMMA, splitmix._FIRST, splitmix._SECOND)]
    assert [kernel._GAMMA.value, kernel._FIRST.value, kernel._SECOND.value] == signed
