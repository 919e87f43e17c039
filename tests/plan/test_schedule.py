"""The order of passes is megatron's own, and the bubble is the share of slots in which a stage has nothing to do."""

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
    for backward_slots in (1, 2):
        ones = [[1.0] * case.vpp for _ in range(case.pp)]
        later = [[float(backward_slots)] * case.vpp for _ in range(case.pp)]
        line = schedule.timeline(ones, later, micro_batches=case.micro_batches)
        assert line.bubble == pytest.approx(_idle_share(found.get(), case, backward_slots))


def _idle_share(orders: list[list[tuple[bool, int]]], case: Case, backward_slots: int) -> float:
    """The share of idle slots of the recorded order, counted slot by slot: a forward pass takes one, and a stage's next
    pass begins once its neighbour's is done, without time between. Which micro-batch a pass is of follows from how often
    its stage has had such a pass."""
    ready: dict[tuple[bool, int, int], int] = {}  # (forward, virtual stage, number) -> slot after it
    free = [0] * case.pp  # slot after the last pass of each stage
    position, seen = [0] * case.pp, [{} for _ in range(case.pp)]
    busy = slot = 0
    last = case.pp * case.vpp - 1
    while any(position[s] < len(orders[s]) for s in range(case.pp)):
        for stage in range(case.pp):
            if position[stage] == len(orders[stage]) or free[stage] > slot:
                continue
            forward, chunk = orders[stage][position[stage]]
            if not forward:  # backward passes take chunks from the last to the first, as many of each at a time
                so_far = sum(n for (f, _), n in seen[stage].items() if not f)
                chunk = case.vpp - 1 - (so_far // case.pp) % case.vpp if case.vpp > 1 else 0
            number = seen[stage].get((forward, chunk), 0)
            place = chunk * case.pp + stage
            if forward:
                needs = (True, place - 1, number) if place else None
            else:
                needs = (False, place + 1, number) if place < last else (True, place, number)
            if needs is not None and ready.get(needs, slot + 1) > slot:
                continue
            slots = 1 if forward else backward_slots
            free[stage] = ready[forward, place, number] = slot + slots
            seen[stage][forward, chunk] = number + 1
            position[stage] += 1
            busy += slots
        slot += 1
        assert slot < 10_000, "it waits for itself"
    return 1 - busy / (case.pp * max(free))


@pytest.mark.parametrize(("pp", "vpp", "count"), [(4, 1, 8), (8, 1, 64), (4, 2, 16), (8, 4, 32)])
def test_the_bubble_is_the_known_formula(pp, vpp, count):
    """(p - 1) / v of the time of p stages' m micro-batches (Narayanan et al., 2021, section 2.2)."""
    one, two = [[1.0] * vpp for _ in range(pp)], [[2.0] * vpp for _ in range(pp)]
    line = schedule.timeline(one, two, micro_batches=count)
    idle = (pp - 1) / vpp / count
    assert line.bubble == pytest.approx(idle / (1 + idle), rel=0.1)
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
