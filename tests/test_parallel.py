"""Degrees and coordinates, against brute force over the ranks of a world."""

from __future__ import annotations

import itertools

import pytest

from mrl.errors import ConfigError
from mrl.parallel import ParallelDims

DEGREES = (1, 2, 3, 4)


def layouts():
    for tp, cp, pp, dp, ep, etp in itertools.product(DEGREES, (1, 2), (1, 2), (1, 2, 3), DEGREES, (1, 2)):
        if tp * cp * dp % (ep * etp) == 0:
            yield ParallelDims(world_size=tp * cp * pp * dp, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)


def test_every_rank_has_coordinates_of_its_own():
    for dims in layouts():
        places = [dims.coordinates(rank) for rank in range(dims.world_size)]
        dense = {(p.tp_rank, p.cp_rank, p.dp_rank, p.pp_rank) for p in places}
        expert = {(p.etp_rank, p.ep_rank, p.edp_rank, p.pp_rank) for p in places}
        assert len(dense) == len(expert) == dims.world_size, dims


def test_experts_span_replicas_where_a_group_that_holds_them_does():
    for dims in layouts():
        groups: dict[tuple, set] = {}
        for place in map(dims.coordinates, range(dims.world_size)):
            groups.setdefault((place.pp_rank, place.edp_rank), set()).add((place.cp_rank, place.dp_rank))
        assert dims.experts_span_replicas == any(len(replicas) > 1 for replicas in groups.values()), dims


@pytest.mark.parametrize(
    "degrees, key",
    [
        ({"world_size": 4, "tp": 3}, "engine.parallel: tp*pp*cp"),
        ({"world_size": 4, "ep": 3}, "engine.parallel: ep*etp"),
        ({"world_size": 2, "vpp": 2}, "engine.parallel.vpp"),
        ({"world_size": 2, "sp": True}, "engine.parallel.sp"),
        ({"world_size": 2, "tp": 0}, "engine.parallel.tp"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_by_key(degrees, key):
    with pytest.raises(ConfigError) as error:
        ParallelDims(**degrees)
    assert str(error.value).startswith(key)
