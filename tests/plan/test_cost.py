"""Communication and time of an update by hand, from figures of two stages that are given.

A rank's own groups by arithmetic are those that megatron lists for all ranks.

What tensor parallelism with sequence parallelism sends, by hand.

A layer has two column-parallel and two row-parallel products. Forward: a gather before each of the former, a scatter after
each of the latter. Backward: the transposes of both, and a gather of each column-parallel input again, for its weight's
gradient: 6 gathers and 4 scatters. The embedding scatters, and gathers in the backward pass.
"""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
from megatron.core import parallel_state

from mrl.config.schema import RoleConfig
from mrl.engine.megatron.meta import Buffer, ChunkFigures, RankFigures, own_group
from mrl.engine.megatron.meta_run import Traffic
from mrl.parallel import ParallelDims
from mrl.plan.cost import TIED, cost, estimated_times, hop_of, link_of, moved_bytes
from mrl.plan.gpus import gpu_of
from mrl.plan.memory import MicroBatches, RolePlan
from tests.engine import tiny

GPU = gpu_of("h100-80gb,TFLOPS=1,LINK=100,NETWORK=10,HBM=1000")  # round figures
DIMS = ParallelDims(16, tp=2, pp=2)  # dp 4; stages of 8 ranks, a node each


FREE = ChunkFigures(
    saved=0, forward_peak=0, backward_peak=0, forward_flops=0, backward_flops=0, forward_traffic=(),
    backward_traffic=(), sent=10**9, shared=0,
)  # fmt: skip


def stage(number: int, flops: float = 1e12) -> RankFigures:
    chunk = ChunkFigures(
        saved=10, forward_peak=15, backward_peak=12, forward_flops=flops, backward_flops=2 * flops,
        forward_traffic=(Traffic("tp", "all_gather", 2, 2 * 10**9),), backward_traffic=(), sent=(1 - number) * 10**9, shared=0,
    )  # fmt: skip
    return RankFigures(
        coords=DIMS.coordinates(8 * number), parameters=2 * 10**9, trained_parameters=10**9, buffers=0,
        grad_buffers=(Buffer(False, 4, 10**9, 2, (250_000_000,) * 4),), chunks=(chunk,), layers=((number,),), dtype_bytes=2,
        tied_gradient=10**8,
    )  # fmt: skip


@pytest.fixture
def found():
    stages = (stage(0), stage(1))
    plan = RolePlan("", "m", RoleConfig, DIMS, stages, ())
    return cost(plan, stages, MicroBatches((8,), 3), GPU, steps=2, times=estimated_times(stages, GPU, 0.5))


def test_what_is_sent(found):
    sent = {(m.group, m.op): (m.bytes, m.ranks, m.link) for m in found.moved}
    assert sent == {
        ("tp", "all_gather"): (2 * 3 * 10**9, 2, "node"),  # half of each, 3 micro-batches, 2 steps
        ("pp", "send"): (2 * 3 * 2 * 10**9, 2, "network"),  # there and back
        ("dp", "reduce_scatter"): (2 * 3 * 10**9, 4, "node"),  # 3 quarters of 4 bytes each
        ("dp", "all_gather"): (2 * 1_500_000_000, 4, "node"),  # 3 quarters of 2 bytes each
        (TIED, "all_reduce"): (2 * 10**8, 2, "network"),
    }


def test_how_long_it_takes(found):
    forward, backward, way = 2 + 0.01, 4.0, 0.1  # 1 TFLOP at half of 1 TFLOP/s; 1 GB over 100 GB/s; 1 GB over 10 GB/s
    # 1F1B of two stages and three micro-batches: the first stage's last forward, and what follows it on the second
    assert found.pipeline_s == pytest.approx(2 * (4 * (forward + backward) + 2 * way), rel=0.02)
    assert found.even_bubble == pytest.approx(1 / 4)  # (p - 1) / (m + p - 1)
    assert found.bubble == pytest.approx(1 / 4, rel=0.05)
    assert found.gradients_s == pytest.approx(6e9 / 1e11 + 3e9 / 1e11 + 2e8 / 1e10)
    assert found.optimizer_s == pytest.approx(2 * 250e6 * 30 / 1e12)
    assert found.flops == 2 * 3 * 3e12


@pytest.mark.parametrize(
    ("op", "bytes_"),
    [("all_gather", 75), ("reduce_scatter", 75), ("all_to_all", 75), ("all_reduce", 150), ("send", 100)],
)
def test_a_ring_of_four(op, bytes_):
    assert moved_bytes(op, 4, 100) == bytes_


@pytest.mark.parametrize(
    ("dims", "group", "link"),
    [
        (ParallelDims(16, tp=8), "tp", "node"), (ParallelDims(16, tp=16), "tp", "network"),
        (ParallelDims(8, pp=2), "pp", "node"), (ParallelDims(16, pp=2), "pp", "network"),
        (ParallelDims(16, pp=2), "dp", "node"), (ParallelDims(16, tp=4, cp=4), "cp", "network"),
        (ParallelDims(12, cp=3), "cp", "network"), (ParallelDims(16, ep=8, etp=1), "ep", "node"),
    ],
)  # fmt: skip
def test_links(dims, group, link):
    """Ranks that are neighbours share a node of 8; a group of 3 does not divide it, and so some reach over its end."""
    assert link_of(dims, group, GPU) == link


def test_stages_in_one_node_send_over_its_links():
    dims = ParallelDims(16, pp=8)  # four stages a node
    assert [hop_of(dims, stage, GPU) for stage in range(8)] == [*["node"] * 3, "network"] * 2  # the last to the first
    assert link_of(dims, "pp", GPU) == "network"

    def seconds(pp: int) -> float:
        dims = ParallelDims(16, pp=pp)
        stages = [dataclasses.replace(stage(i % 2), chunks=(FREE,), grad_buffers=()) for i in range(pp)]
        return cost(RolePlan("", "m", RoleConfig, dims, (), ()), stages, MicroBatches((8,), 1), GPU, steps=1,
                    times=estimated_times(stages, GPU, 1), forward_only=True).pipeline_s  # fmt: skip

    assert seconds(8) == pytest.approx(6 * 0.01 + 0.1)  # 1 GB by seven hops, one of them to the other node
    assert seconds(2) == pytest.approx(0.1)


def test_the_optimizer_writes_an_fp32_parameter_once():
    stages = [
        dataclasses.replace(stage(i), grad_buffers=(Buffer(False, 4, 10**9, 4, (250_000_000,) * 4),)) for i in range(2)
    ]
    plan = RolePlan("", "m", RoleConfig, DIMS, tuple(stages), ())
    took = cost(plan, stages, MicroBatches((8,), 3), GPU, steps=2, times=estimated_times(stages, GPU, 0.5)).optimizer_s
    assert took == pytest.approx(2 * 250e6 * 28 / 1e12)


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


@pytest.mark.parametrize("tp", [2, 4])
def test_gathers_and_scatters_are_counted_by_whole_tensors(planner, tmp_path, tp):
    folder = tiny.make_model(str(tmp_path), "llama", layers=4, num_attention_heads=4, num_key_value_heads=4)
    config, tokens, layers = tiny.role(folder, backend="megatron"), 16, 2  # on the first of two stages
    dims = ParallelDims(2 * tp, tp=tp, pp=2, sp=True)
    found = planner.call("tests.plan.planned:tensor_parallel_bytes", config, dims, [tokens])
    whole = tokens * json.loads((tmp_path / "config.json").read_text())["hidden_size"] * 4
    assert found["all_gather"] == (6 * layers + 1) * whole
    assert found["reduce_scatter"] == (4 * layers + 1) * whole
