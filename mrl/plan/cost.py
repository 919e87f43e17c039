"""Communication, pipeline bubble and time of the updates of a role, from what its passes do.

Times are estimates. Matrix products run at a share of the GPU's peak (`efficiency`). Collectives run at the rate of the
link that their ranks share, one after the other, as in megatron's plain schedule. They are ring algorithms: an
all-gather, a reduce-scatter or an all-to-all of B bytes over n ranks moves B (n-1)/n a rank. An all-reduce moves twice
that.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Literal

from mrl.engine.megatron.meta import RankFigures
from mrl.engine.megatron.meta_run import Traffic
from mrl.engine.megatron.stage_times import StageTimes
from mrl.parallel import ParallelDims
from mrl.plan import schedule
from mrl.plan.gpus import GPU
from mrl.plan.memory import MicroBatches, RolePlan

Link = Literal["node", "network"]

TIED = "tied embeddings"
"""The first and the last stage, which each have the embedding of a model whose output layer is that too."""


@dataclasses.dataclass(frozen=True)
class MovedBytes:
    """The bytes that the busiest rank sends in one kind of communication during a step."""

    group: str
    op: str
    ranks: int
    link: Link
    bytes: int


@dataclasses.dataclass(frozen=True)
class Cost:
    """A role's mini-batches of one step."""

    moved: tuple[MovedBytes, ...]
    bubble: float  # share of the stages' time that they wait, with the passes' own times
    even_bubble: float  # the same, if all passes took the same time: of the schedule alone
    flops: float  # that the busiest rank computes, with what is computed again
    pipeline_s: float
    gradients_s: float  # to reduce gradients and gather parameters
    optimizer_s: float

    @property
    def seconds(self) -> float:
        return self.pipeline_s + self.gradients_s + self.optimizer_s


def moved_bytes(op: str, ranks: int, size: int) -> float:
    """Returns what a rank sends in a collective of `size` bytes."""
    share = (ranks - 1) / ranks
    return size * (2 * share if op == "all_reduce" else 1 if op in ("send", "broadcast") else share)


def span(dims: ParallelDims, group: str) -> int:
    """Returns how many neighbouring ranks a group of this kind reaches over (order tp-cp-ep-dp-pp, mrl.parallel)."""
    reach = {
        "tp": dims.tp, "cp": dims.tp * dims.cp, "tp*cp": dims.tp * dims.cp, "etp": dims.etp,
        "ep": dims.etp * dims.ep, "etp*ep": dims.etp * dims.ep,
        "dp": dims.world_size // dims.pp, "edp": dims.world_size // dims.pp,
    }  # fmt: skip
    return reach.get(group, dims.world_size)


def link_of(dims: ParallelDims, group: str, gpu: GPU) -> Link:
    """Returns the slowest link between ranks of such a group that send to each other."""
    if group == "pp":
        hops = [hop_of(dims, stage, gpu) for stage in range(dims.pp if dims.vpp > 1 else dims.pp - 1)]
        return "network" if "network" in hops else "node"
    reach = span(dims, group)
    return "node" if reach <= gpu.per_node and gpu.per_node % reach == 0 else "network"


def hop_of(dims: ParallelDims, stage: int, gpu: GPU) -> Link:
    """Returns the slowest link from ranks of a stage to their places in the next; after the last comes the first."""
    each = dims.world_size // dims.pp
    ranks = range(stage * each, stage * each + min(each, gpu.per_node))
    away = any(rank // gpu.per_node != (rank + each) % dims.world_size // gpu.per_node for rank in ranks)
    return "network" if away else "node"


def estimated_times(stages: Sequence[RankFigures], gpu: GPU, efficiency: float) -> list[StageTimes]:
    """Returns the times of the stages by their FLOPs and bytes. efficiency: the share of the GPU's peak."""
    rate = gpu.flops * efficiency
    return [
        StageTimes(
            tuple(c.forward_flops / rate for c in stage.chunks), tuple(c.backward_flops / rate for c in stage.chunks),
            _updated_bytes(stage) / gpu.memory_rate,
        )
        for stage in stages
    ]  # fmt: skip


def cost(
    plan: RolePlan, stages: Sequence[RankFigures], batches: MicroBatches, gpu: GPU, *, steps: int,
    times: Sequence[StageTimes], forward_only: bool = False,
) -> Cost:  # fmt: skip
    """Returns the cost of `steps` mini-batches of a role. times: of the stages, estimated or measured."""
    dims = plan.dims

    rates = {"node": gpu.link, "network": gpu.network}

    def rate(group: str) -> float:
        return rates[link_of(dims, group, gpu)]

    def sent(traffic: Iterable[Traffic]) -> float:
        return sum(moved_bytes(one.op, one.ranks, one.bytes) / rate(one.group) for one in traffic)

    forward = [
        [t + sent(c.forward_traffic) for t, c in zip(own.forward, stage.chunks, strict=True)]
        for own, stage in zip(times, stages, strict=True)
    ]
    backward = [
        [t + sent(c.backward_traffic) for t, c in zip(own.backward, stage.chunks, strict=True)]
        for own, stage in zip(times, stages, strict=True)
    ]
    send = [[c.sent / rates[hop_of(dims, i, gpu)] for c in stage.chunks] for i, stage in enumerate(stages)]
    line = schedule.timeline(forward, backward, micro_batches=batches.count, forward_only=forward_only, send=send)
    even = [[1.0] * dims.vpp for _ in stages]
    twice = [[2.0] * dims.vpp for _ in stages]
    plain = schedule.timeline(even, twice, micro_batches=batches.count, forward_only=forward_only)
    moved = _moved(dims, stages, batches.count, steps, gpu, forward_only)
    gradients_s = sum(m.bytes / rate(m.group) for m in moved if m.group in ("dp", "edp", TIED))
    busiest = max(stages, key=lambda s: sum(c.forward_flops + c.backward_flops for c in s.chunks))
    flops = sum(c.forward_flops + (0 if forward_only else c.backward_flops) for c in busiest.chunks)
    optimizer_s = 0.0 if forward_only else max(own.optimizer for own in times)
    return Cost(
        moved=tuple(moved), bubble=line.bubble, even_bubble=plain.bubble, flops=flops * batches.count * steps,
        pipeline_s=line.makespan * steps, gradients_s=gradients_s,
        optimizer_s=optimizer_s * steps,
    )  # fmt: skip


def _updated_bytes(stage: RankFigures) -> int:
    """Returns bytes that the optimizer reads and writes on the rank of a stage with the most updates.

    It reads an element's gradient, master and both moments. It writes master, moments and a bf16 parameter. This makes
    30 bytes with fp32 moments. An fp32 weight is its own master, written once: 28.
    """
    return sum(
        (2 * b.optimizer_bytes + (6 if b.parameter_bytes != 4 else 12)) * max(b.masters) for b in stage.grad_buffers
    )


def _moved(
    dims: ParallelDims, stages: Sequence[RankFigures], micro_batches: int, steps: int, gpu: GPU, forward_only: bool
) -> list[MovedBytes]:
    """Returns bytes sent in a step, of the stage that sends most of each kind."""
    most: dict[tuple[str, str, int], float] = {}
    for stage in stages:
        for kind, size in _sent(dims, stage, micro_batches, forward_only).items():
            most[kind] = max(most.get(kind, 0.0), size)
    moved = []
    for (group, op, ranks), size in sorted(most.items()):
        if ranks > 1 and size:
            moved.append(MovedBytes(group, op, ranks, link_of(dims, group, gpu), math.ceil(size * steps)))
    return moved


def _sent(
    dims: ParallelDims, stage: RankFigures, micro_batches: int, forward_only: bool
) -> dict[tuple[str, str, int], float]:
    """Returns bytes that a stage sends in a mini-batch, by group, collective and number of ranks."""
    sent: dict[tuple[str, str, int], float] = collections.defaultdict(float)
    for chunk in stage.chunks:
        for one in (*chunk.forward_traffic, *chunk.backward_traffic):
            sent[one.group, one.op, one.ranks] += moved_bytes(one.op, one.ranks, one.bytes) * micro_batches
        # hidden states go to the next stage, and their gradients, as large, come back from there
        sent["pp", "send", dims.pp] += chunk.sent * micro_batches * (1 if forward_only else 2)
    if forward_only:
        return sent
    for buffer in stage.grad_buffers:
        group, ranks = ("edp" if buffer.of_experts else "dp"), buffer.ranks
        sent[group, "reduce_scatter", ranks] += moved_bytes("reduce_scatter", ranks, 4 * buffer.elements)
        whole = buffer.parameter_bytes * buffer.elements
        sent[group, "all_gather", ranks] += moved_bytes("all_gather", ranks, whole)
    sent[TIED, "all_reduce", 2] += moved_bytes("all_reduce", 2, stage.tied_gradient)
    return sent
