"""The order of passes is megatron's own, and the bubble is the share of time in which a stage has nothing to do."""

from __future__ import annotations

import pytest

from mrl.plan import schedule
from tests.cuda.cases import Case
from tests.cuda.test_engine import DENSE, NARROW
from tests.engine import harness
from tests.tiers import nightly_but

TINY = NARROW | {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
RUNS = [
    Case(DENSE, world=2, pp=2, vpp=2, micro_batches=6, lengths=(8,), changes=TINY),
    Case(DENSE, world=4, pp=4, micro_batches=6, lengths=(8,), changes=TINY),
    Case(DENSE, world=4, pp=4, micro_batches=3, lengths=(8,), changes=TINY),
    Case(DENSE, world=4, pp=4, vpp=2, layers=8, micro_batches=8, lengths=(8,), changes=TINY),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", nightly_but(RUNS[:2], RUNS), ids=str)
def test_passes_are_those_of_megatron(case):
    [found] = harness.run_world(case.world, [harness.Case("tests.plan.recorded:order", {"case": case})])
    for stage, seen in enumerate(found.get()):
        expected = schedule.passes(stage, pp=case.pp, vpp=case.vpp, micro_batches=case.micro_batches)
        assert [(one.forward, one.chunk if one.forward else -1) for one in expected] == seen, f"stage {stage}"


@pytest.mark.parametrize(("pp", "vpp", "count"), [(4, 1, 3), (4, 1, 6), (2, 2, 6), (8, 4, 32)])
def test_the_bubble_is_the_known_formula(pp, vpp, count):
    """(p - 1) / v of the time of p stages' m micro-batches (Narayanan et al., 2021, section 2.2), exactly, as counts of slots have it."""
    one, two = [[1.0] * vpp for _ in range(pp)], [[2.0] * vpp for _ in range(pp)]
    line = schedule.timeline(one, two, micro_batches=count)
    idle = (pp - 1) / vpp / count
    assert line.bubble == pytest.approx(idle / (1 + idle), rel=1e-12)
    assert f"{schedule.Timeline(0.3, (0.1 + 0.2,)).bubble:.1%}" == "0.0%", "rounding leaves no negative zero"


def test_activations_of_1f1b_are_of_as_many_micro_batches_as_stages_follow():
    order = schedule.passes(0, pp=4, vpp=1, micro_batches=16)
    assert schedule.most_alive(order, [10], [10], [12]) == 3 * 10 + 12
    order = schedule.passes(3, pp=4, vpp=1, micro_batches=16)
    assert schedule.most_alive(order, [10], [15], [12]) == 15
    assert (
        schedule.most_alive(schedule.passes(0, pp=4, vpp=1, micro_batches=9, forward_only=True), [10], [15], [0]) == 15
    )


def test_what_is_sent_is_waited_for():
    """Two stages, one micro-batch: forward, its hidden states' way, forward, backward, the gradients' way, backward."""
    ones, twos = [[1.0], [1.0]], [[2.0], [2.0]]
    line = schedule.timeline(ones, twos, micro_batches=1, send=[[0.25], [0.0]])
    assert line.makespan == 1 + 0.25 + 1 + 2 + 0.25 + 2 and line.busy == (3, 3)
    assert schedule.timeline(ones, twos, micro_batches=1, send=[[0.25], [0.0]], forward_only=True).makespan == 2.25


@pytest.mark.parametrize(("stage", "pp", "vpp", "leading"), [(0, 4, 1, 4), (3, 4, 1, 1), (0, 4, 2, 11), (3, 4, 2, 5)])
def test_forward_passes_before_the_first_backward_pass(stage, pp, vpp, leading):
    """Those of the warm-up, and one: pp - stage - 1, with virtual stages 2 (pp - stage - 1) + (vpp - 1) pp."""
    order = schedule.passes(stage, pp=pp, vpp=vpp, micro_batches=16)
    assert [one.forward for one in order].index(False) == leading
