"""What `mrl plan` says of a GPU with mrl's kernels is what the same update takes on CUDA tensors that have no memory.

tests/kernels/test_planned.py compares the kernels' functions with those that run, to the byte.
"""

from __future__ import annotations

import dataclasses

import pytest

from tests.cuda.cases import DELTA, DENSE, LATENT, LENGTHS, MOE, Case
from tests.cuda.test_engine import NARROW
from tests.plan.conftest import planner  # noqa: F401
from tests.plan.test_truth import FEW, SMALL
from tests.plan.test_truth import LATENT as NARROW_LATENT
from tests.tiers import in_tiers

CASES = [
    Case(DENSE, layers=2),  # a head of 151,936 columns
    Case(DENSE, world=2, tp=2, changes=NARROW),
    Case(DENSE, world=2, pp=2, rank=1, changes=NARROW),
    Case(DENSE, recompute="full", changes=NARROW),
    Case(MOE, world=4, tp=2, ep=2, etp=1, changes=FEW),
    Case(MOE, grouped=True, changes=FEW),
    Case(LATENT, world=2, pp=2, mtp=True, changes=NARROW_LATENT),
    Case(DELTA, world=2, pp=2, rank=1, changes=SMALL),
]
OF_TE = [Case(DENSE, spec="te", layers=2), Case(MOE, world=4, tp=2, ep=2, etp=1, spec="te", changes=FEW)]


def held(planner, case, *, kernels):  # noqa: F811
    return planner.call("tests.plan.planned:held", case, kernels=kernels)[case.rank]


@pytest.mark.parametrize("case", in_tiers([], [CASES[4], CASES[6]], CASES), ids=str)
def test_activations_are_those_of_kernels(worker, planner, case):  # noqa: F811
    """Within 4 %: a plan leaves out what a pipeline's stages send, and a micro-batch's tokens. Products stay the same,
    and state is exact."""
    planned, plain = (held(planner, case, kernels=on) for on in (True, False))
    found = worker.call("tests.cuda.run:run", case)
    assert {name: planned[name] for name in found.held} == found.held
    assert planned["activations"] == pytest.approx(found.activations, rel=0.04)
    assert planned["activations"] < plain["activations"] and planned["flops"] == plain["flops"]


@pytest.mark.parametrize("case", in_tiers([], OF_TE[:1], OF_TE), ids=str)
def test_a_token_takes_what_is_planned_under_te(te_worker, planner, case):  # noqa: F811
    """Of 3,072 tokens more. te has workspaces that no token changes."""
    cases = [dataclasses.replace(case, lengths=tuple(n * length for length in LENGTHS)) for n in (1, 4)]
    plans = [held(planner, one, kernels=True) for one in cases]
    planned = [one["activations"] for one in plans]
    real = [te_worker.call("tests.cuda.te_update:update", one, (9, 0)).result.activations for one in cases]
    workspaces = real[0] - planned[0] - plans[0]["buffers"]  # those of products: one, or four of experts' streams
    assert 0 <= workspaces < 2e8
    assert real[1] - real[0] <= planned[1] - planned[0] <= 1.1 * (real[1] - real[0])
    assert planned[0] < held(planner, cases[0], kernels=False)["activations"]
