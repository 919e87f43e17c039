"""First-step guards: what they report, and what they must not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mrl.engine import guards
from mrl.engine.guards import FaultKind, Problem, WatchedParameter
from tests.engine.harness import run_case

LR, EPS = 1e-3, 1e-8


def after_step(weight, gradient, *, new=None, lr=LR, **watched):
    before = torch.tensor(weight)
    g = None if gradient is None else torch.tensor(gradient)
    found = guards.inspect([WatchedParameter("w", before, g, **watched)], lr=lr, eps=EPS)
    return [str(p) for p in guards.problems(found, [("w", torch.tensor(weight if new is None else new))])]


STILL, ZERO, NONE = (
    "w: it has a gradient but the step did not change it",
    "w: its gradient is zero",
    "w: it has no gradient",
)


@pytest.mark.parametrize(
    ("weight", "gradient", "options", "says"),
    [
        ([1.0, 2.0], [0.1, 0.0], {"new": [0.999, 2.0]}, []),
        ([1.0, 2.0], [0.1, -0.1], {}, [STILL]),  # trap 24
        ([1.0, 2.0], [0.1, float("nan")], {}, ["w: its gradient is not finite"]),
        ([1.0, 2.0], [0.1, float("inf")], {}, ["w: its gradient is not finite"]),
        ([1.0], None, {}, [NONE]),
        ([1.0], [0.0], {}, [ZERO]),
        # an expert without tokens may stay, but one with tokens may not
        ([1.0], [0.0], {"may_be_idle": True}, []),
        ([1.0], [0.1], {"may_be_idle": True}, [STILL]),
        # A of a tower that never sees an image waits for a B that never moves: guards would never end
        ([1.0], [0.0], {"waits": True}, ["w: its gradient is zero as long as B of its adapter is"]),
        ([1.0], [0.0], {"waits": True, "may_be_idle": True}, []),
        ([1.0], None, {"waits": True, "may_be_idle": True}, [NONE]),
        # the first step of a warm-up over 1000 steps to 1e-5: 1e-8 of a norm weight of 1 is nothing in fp32
        ([1.0], [0.1], {"lr": 1e-8}, []),
        ([1.0, 1e-4], [0.1, 0.1], {"lr": 1e-8}, [STILL]),
    ],
)
def test_what_is_said_of_a_step(weight, gradient, options, says):
    assert after_step(weight, gradient, **options) == says


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_checksum_sees_one_bit_and_a_swap(dtype):
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    swapped, flipped = tensor.clone(), tensor.clone()
    swapped[3], swapped[700] = tensor[700], tensor[3]
    flipped[5] = (
        torch.nextafter(tensor[5], torch.tensor(9.0, dtype=dtype)) if dtype != torch.bfloat16 else tensor[5] * 2
    )
    sums = {guards.checksum(t) for t in (tensor, swapped, flipped)}
    assert len(sums) == 3 and guards.checksum(tensor.clone()) == guards.checksum(tensor)


def test_a_checksum_does_not_depend_on_the_chunks(monkeypatch):
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    whole = guards.checksum(tensor)
    monkeypatch.setitem(guards.CHUNK, "cpu", 7)
    assert guards.checksum(tensor) == whole


@pytest.mark.parametrize("entries", [4, 16])
def test_the_first_step_of_adamw_is_never_missed(entries):
    """10,000 pieces of weights between two powers of two: AdamW moves each entry by the same number of roundings, up or down,
    so that many pieces keep the sum of their entries, and that of their entries times their places (+ - - +)."""
    generator = torch.Generator().manual_seed(0)
    pieces = 0.009 + 0.006 * torch.rand(10_000, entries, generator=generator)
    parameter = torch.nn.Parameter(pieces.clone())
    parameter.grad = torch.randn(pieces.shape, generator=generator)
    torch.optim.AdamW([parameter], lr=1e-5, weight_decay=0.0).step()
    moved = parameter.detach()
    before, after = (guards.hashes(t.view(torch.int32), 0).sum(1) for t in (pieces, moved))
    assert before[0] == guards.checksum(pieces[0]) and after[-1] == guards.checksum(moved[-1])
    assert (pieces != moved).all() and (before == after).sum() == 0
    assert before.unique().numel() == len(before)


def over_ranks():
    """Rank 0 holds the rows of an embedding that occur and rank 1 the others; "half" stays on rank 1 alone, where it should
    move too; of those that stay, A of an adapter waits where all of B is zero; replicas differ, those of "balanced" by + - - +."""
    rank = dist.get_rank()
    rows = WatchedParameter("embedding", torch.ones(2), torch.full((2,), 0.1 if rank == 0 else 0.0))
    own = WatchedParameter(f"stage{rank}", torch.ones(1), torch.ones(1))
    half = WatchedParameter("half", torch.ones(2), torch.ones(2))
    zero = torch.zeros(1)
    still = [
        WatchedParameter("idle here", zero, zero, may_be_idle=rank == 0),
        WatchedParameter("waits here", zero, zero, waits=rank == 0),
        WatchedParameter("waits", zero, zero, waits=True),
    ]
    found = guards.inspect([rows, own, half, *still], lr=LR, eps=EPS)
    moved = torch.ones(2) - (0.001 if rank == 0 else 0.0)
    after = [("embedding", moved), (own.name, zero), ("half", moved), *((p.name, zero) for p in still)]
    found_wrong = guards.problems(found, after)
    balanced = torch.full((4,), 1.5) + rank * 2.0**-20 * torch.tensor([1.0, -1.0, -1.0, 1.0])
    replicas = [("same", torch.ones(3)), ("other", torch.full((3,), float(rank))), ("balanced", balanced)]
    found_wrong += guards.replica_problems(replicas, None)
    of_all = guards.merge_problems(
        [Problem(FaultKind.UNCHANGED, f"from {rank}"), Problem(FaultKind.NO_GRADIENT, "both")]
    )
    return [str(p) for p in found_wrong], [p.parameter for p in of_all]


def test_each_piece_of_a_parameter_is_judged_and_replicas_are_compared():
    messages, union = run_case(2, "tests.engine.test_guards:over_ranks")
    assert messages == [
        "half: it has a gradient but the step did not change it",
        "idle here: its gradient is zero",
        "waits: its gradient is zero as long as B of its adapter is",
        "waits here: its gradient is zero",
        "other: its replicas on ranks [0, 1] differ",
        "balanced: its replicas on ranks [0, 1] differ",
    ]
    assert union == ["both", "from 0", "from 1"]
