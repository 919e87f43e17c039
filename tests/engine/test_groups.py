"""Groups of sequences, as the two answers of a pair: no rank and no micro-batch divides one, and limits hold."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrl.batch import make_batch
from mrl.engine.collective import share_of
from mrl.engine.microbatch import plan_micro_batches, shares

pairs_of_lengths = st.lists(st.integers(1, 32), min_size=2, max_size=30).map(lambda x: x[: len(x) // 2 * 2])


def are_whole(sequences):
    """Whether each pair is there, its chosen answer first."""
    return [i ^ 1 for i in sequences[0::2]] == list(sequences[1::2]) and all(i % 2 == 0 for i in sequences[0::2])


@given(pairs_of_lengths, st.integers(1, 4))
def test_ranks_get_whole_pairs_and_all_of_them(lengths, n):
    parts = shares(lengths, n, 2)
    assert all(are_whole(part) for part in parts)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))


@given(pairs_of_lengths, st.booleans(), st.sampled_from([{"size": 2}, {"size": 4}, {"tokens": 64}, {"tokens": 90}]))
def test_micro_batches_have_whole_pairs_within_their_limits(lengths, packed, limit):
    plan = plan_micro_batches(lengths, group=2, packed=packed, **limit)
    assert all(are_whole(part) for part in plan)
    assert sorted(i for part in plan for i in part) == list(range(len(lengths)))
    for part in plan:
        of = [lengths[i] for i in part]
        assert len(part) <= limit.get("size", len(part))
        assert (sum(of) if packed else len(of) * max(of)) <= limit.get("tokens", 10**9)


def test_a_micro_batch_that_holds_half_a_pair_is_refused():
    with pytest.raises(AssertionError, match="micro-batches of 3 sequences hold no whole groups of 2"):
        plan_micro_batches([4, 4], group=2, size=3, packed=True)


def test_a_batch_says_what_belongs_together():
    ids = [[1] * n for n in (9, 2, 3, 3, 8, 2)]
    batch = dataclasses.replace(make_batch(ids, ids), group=2)
    parts = [share_of(batch, rank, 2) for rank in range(2)]
    assert [part.lengths.tolist() for part in parts] == [[8, 1], [2, 2, 7, 1]] and parts[0].group == 2
    assert torch.equal(torch.cat([part.tokens for part in parts]), batch.tokens)
