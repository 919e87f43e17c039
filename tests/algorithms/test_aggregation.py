"""The aggregates of PPO, GRPO and Dr. GRPO, written as means over lists, against weights and a denominator.

Traps 5 (a mean of means) and 7 (length instead of mask).
"""

from __future__ import annotations

import pytest
from hypothesis import given

from mrl.algorithms.aggregation import DENOMINATORS, token_weights
from tests.algorithms.sequences import examples, ragged

LONGEST = 11


def oracle(name, losses, masks):
    """The aggregate of a whole mini-batch."""
    trained = [[x for x, m in zip(*rows, strict=True) if m] for rows in zip(losses, masks, strict=True)]
    trained = [row for row in trained if row]
    if name == "token_mean":
        return sum(map(sum, trained)) / sum(map(len, trained))
    if name == "sequence_mean":
        return sum(sum(row) / len(row) for row in trained) / len(trained)
    return sum(sum(row) / LONGEST for row in trained) / len(trained)


@pytest.mark.parametrize("name", DENOMINATORS)
@examples
@given(case=ragged())
def test_traps_5_and_7_sum_over_any_split_is_the_aggregate(name, case):
    losses = case.rows(-1, 1)
    batch = case.batch(loss=losses)
    total = 0.0
    for part in case.split():
        micro = batch.select(part)
        weights_T = token_weights(name, micro.loss_mask.double(), micro.lengths, fixed_length=LONGEST)
        assert not weights_T[micro.loss_mask == 0].any()
        total += float((micro.token_fields["loss"] * weights_T).sum()) / micro.denominators[DENOMINATORS[name]]
    assert total == pytest.approx(oracle(name, losses, case.masks), rel=1e-9, abs=1e-9)
