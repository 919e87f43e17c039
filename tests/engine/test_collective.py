"""What both engines share that needs no process group."""

import dataclasses

import pytest

from mrl.batch import make_batch
from mrl.engine.collective import denominator_of


def test_a_denominator_that_the_batch_lacks_is_no_silent_1():
    batch = make_batch([[1, 2, 3], [4, 5]], [[0.0, 1.0, 1.0], [0.0, 1.0]])
    assert (denominator_of(batch, "tokens"), denominator_of(batch, "sequences")) == (3.0, 2.0)
    with pytest.raises(AssertionError, match="'sequence'"):
        denominator_of(batch, "sequence")
    with pytest.raises(AssertionError, match="'tokens'"):
        denominator_of(dataclasses.replace(batch, denominators={}), "tokens")


def test_a_mini_batch_of_which_nothing_counts_divides_by_1():
    assert denominator_of(make_batch([[1, 2]], [[0.0, 0.0]]), "tokens") == 1.0
