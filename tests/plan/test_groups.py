"""A rank's own groups by arithmetic are those that megatron lists for all ranks."""

from __future__ import annotations

import itertools

import pytest
from megatron.core import parallel_state

from mrl.engine.megatron.meta import own_group


@pytest.mark.parametrize("sizes", [(2, 3, 2, 2), (1, 4, 2, 1), (2, 1, 1, 5)])
def test_own_group_is_one_of_megatrons(sizes):
    world = 1
    for size in sizes:
        world *= size
    for mask in itertools.product((True, False), repeat=len(sizes)):
        listed = parallel_state.generate_masked_orthogonal_rank_groups(world, list(sizes), list(mask))
        for rank in range(world):
            assert own_group(rank, sizes, mask) in listed
            assert rank in own_group(rank, sizes, mask)
