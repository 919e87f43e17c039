"""Tensor-parallel communication beside products (`tp_comm_overlap`), of transformer-engine's own Python over a stub of its
C++ (te_stub): no number is computed and nothing is sent. The stub's buffers take tensors of their own shape alone, as the C++
does, so an update that ends has micro-batches of the one size."""

from __future__ import annotations

import dataclasses

import pytest

from tests.cuda.cases import DELTA, DENSE, EVERYTHING, GATED, SINKS
from tests.cuda.te_cases import te_case, te_ceilings
from tests.cuda.test_engine import beyond, dtypes_are_as_stated
from tests.tiers import in_tiers

ON = {"tp_comm_overlap": True}
IN_CHUNKS = ON | {"tp_comm_overlap_rs_dgrad": True, "tp_comm_overlap_disable_qkv": True}
CASE = te_case(DENSE, world=4, rank=1, tp=2, calls=2, megatron=ON)
RING, SCATTER, BULK = "CommOverlapP2P gather", "CommOverlap scatter", "bulk CommOverlap "
"""Products with communication beside: their input gathered in a ring, their output scattered, another tensor gathered or
scattered in bulk."""

# Of a dense layer qkv, fc1 and, in the backward pass, proj, fc2 gather; proj and fc2 scatter; and so do, in bulk, qkv and fc1
# their input again and its gradient.
OF_A_LAYER = {RING: 4, SCATTER: 2, BULK + "gather": 2, BULK + "scatter": 2}
CASES = [
    (CASE, OF_A_LAYER),
    (dataclasses.replace(CASE, megatron=IN_CHUNKS),
     {RING: 3, SCATTER: 2, BULK + "gather": 1, BULK + "scatter": 1, "CommOverlapP2P scatter": 1}),
    (dataclasses.replace(CASE, recompute="full"), OF_A_LAYER | {SCATTER: 4}),  # without gradients layers gather by NCCL
    (te_case(DENSE, world=8, rank=3, tp=2, cp=2, pp=2, vpp=2, offload=EVERYTHING, megatron=ON), OF_A_LAYER),
    (te_case(SINKS, world=4, rank=2, tp=2, ep=2, megatron=ON), {RING: 2, SCATTER: 1, BULK + "gather": 1, BULK + "scatter": 1}),
    (te_case(GATED, world=4, rank=2, tp=2, ep=2, megatron=ON), {RING: 4, SCATTER: 2, BULK + "gather": 1, BULK + "scatter": 1}),
    (te_case(DELTA, world=4, rank=1, tp=2, megatron=ON), OF_A_LAYER),
]  # fmt: skip


@pytest.mark.parametrize("case, overlaps", in_tiers([], [CASES[1], CASES[3]], CASES), ids=str)
def test_an_update_communicates_beside_its_products(te_worker, case, overlaps):
    found, plain = (
        te_worker.call("tests.cuda.te_update:update", each, (9, 0))
        for each in (case, dataclasses.replace(case, megatron={}))
    )
    passes = 2 * case.micro_batches * case.calls  # of the rank's two layers
    assert found.kernels.overlaps == {name: count * passes for name, count in overlaps.items()}
    assert not plain.kernels.overlaps
    dtypes_are_as_stated(case, found.result)
    assert found.result.tensors == plain.result.tensors
    assert found.kernels.products == plain.kernels.products and found.kernels.summed == plain.kernels.summed
    assert found.result.syncs == plain.result.syncs and found.result.step_syncs == plain.result.step_syncs
    assert not beyond(te_ceilings(case), found.result.syncs, "a micro-batch")


@pytest.mark.slow
def test_buffers_are_as_large_as_a_plan_says(te_worker):
    from mrl.mcore_models.userbuffers import BufferShape

    ring = ON | {"tp_comm_overlap_rs_dgrad": True}
    cases = [dataclasses.replace(CASE, calls=1, micro_batches=1, layers=1, megatron=given) for given in (ring, {})]
    with_them, without = (te_worker.call("tests.cuda.te_update:update", case, (9, 0)).result for case in cases)
    wanted = BufferShape(1000, 4096, 2, ("qkv", "fc1"), "nccl")
    assert with_them.after_init - without.after_init == wanted.nbytes


def test_linear_layers_are_given_them_and_experts_and_decoding_are_not(te_worker):
    found = te_worker.call("tests.cuda.te_userbuffers:modules", te_case(GATED, world=2, tp=2, layers=1, megatron=ON))
    gathers, both = "ub_overlap_ag_fprop", ["ub_overlap_rs_fprop", "ub_overlap_ag_dgrad"]
    assert found == {
        "0.self_attention.linear_qkv": ("qkv", [gathers, "ub_bulk_dgrad", "ub_bulk_wgrad"], []),
        "0.self_attention.linear_proj": ("proj", both, []),
        "0.mlp.shared_experts.linear_fc1": ("fc1", [gathers], []),
        "0.mlp.shared_experts.linear_fc2": ("fc2", both, []),
        "0.mlp.experts.linear_fc1": ("fc1", [], []),
        "0.mlp.experts.linear_fc2": ("fc2", [], []),
    }


def test_engines_of_a_process_share_buffers_of_one_shape(te_worker):
    first, same, without, other = te_worker.call("tests.cuda.te_userbuffers:shared", CASE)
    assert (first, same, without) == ("new", "the same", "the same")
    assert other == (
        "engine.megatron.tp_comm_overlap: value true asks for buffers of 2000 places x 4096 over 2 tensor-parallel ranks, "
        "and this process, whose models share them, has 1000 places x 4096 over 2 tensor-parallel ranks; give all models "
        "the same hidden size, tp, cp, micro_batch.tokens and tp_comm_overlap_* fields, or the key to one alone"
    )


def test_what_a_machine_lacks_is_one_line(te_worker):
    machines, none, by_gloo, again = te_worker.call("tests.cuda.te_userbuffers:refused", CASE)
    assert "needs tensor-parallel ranks that share a machine, and its 3 processes are no multiple of 2" in machines
    said = "engine.megatron.tp_comm_overlap: value true cannot be had here: transformer-engine says "
    assert none.startswith(said + "CUDA ") and "UB_SKIPMC=1" in none and "\n" not in none
    assert again == by_gloo and by_gloo.startswith(said + "PyTorch must be compiled with 'gloo' support")
