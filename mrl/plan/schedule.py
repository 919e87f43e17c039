"""megatron's pipeline schedules as lists of what each stage does in turn, and what follows from them.

1F1B is from Narayanan et al., "Efficient Large-Scale Language Model Training", 2021, section 2.2. A stage runs forward
passes until the first backward pass can reach it. Then it runs one of each in turn, then the backward passes that are
left. With virtual stages each rank has several model chunks. Micro-batches then go through the chunks in groups, each
of as many micro-batches as there are stages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class ScheduledPass:
    """One micro-batch through one chunk of a stage."""

    forward: bool
    chunk: int
    micro_batch: int


def passes(stage: int, *, pp: int, vpp: int, micro_batches: int, forward_only: bool = False) -> list[ScheduledPass]:
    """Returns what a stage does, in order, as megatron-core's pipeline_parallel/schedules.py does it."""
    total = micro_batches * vpp
    table = [
        (chunk, micro_batch)
        for first in range(0, micro_batches, pp)
        for chunk in range(vpp)
        for micro_batch in range(first, min(first + pp, micro_batches))
    ]
    forwards = [ScheduledPass(True, *entry) for entry in table]
    backwards = [ScheduledPass(False, vpp - 1 - chunk, micro_batch) for chunk, micro_batch in table]
    if forward_only:
        return forwards
    warmup = 0 if pp == 1 else pp - stage - 1 if vpp == 1 else (pp - stage - 1) * 2 + (vpp - 1) * pp
    warmup = min(warmup, total)
    order = forwards[:warmup]
    for i in range(total - warmup):
        order += [forwards[warmup + i], backwards[i]]
    return order + backwards[total - warmup :]


@dataclasses.dataclass(frozen=True)
class Timeline:
    """When the stages of a pipeline are busy."""

    makespan: float  # from the first pass to the last one of all stages
    busy: tuple[float, ...]  # of each stage

    @property
    def bubble(self) -> float:
        """The share of all stages' time in which they wait."""
        return max(0.0, 1 - sum(self.busy) / (len(self.busy) * self.makespan))  # rounding may give -1e-16


def timeline(
    forward: Sequence[Sequence[float]], backward: Sequence[Sequence[float]], *, micro_batches: int,
    forward_only: bool = False, send: Sequence[Sequence[float]] | None = None,
) -> Timeline:  # fmt: skip
    """Returns when stages are busy.

    - forward, backward: [stage][chunk] the time of one micro-batch.
    - send: the time to send its hidden states to the next chunk, or their gradients back; None for no time.
    """
    pp, vpp = len(forward), len(forward[0])
    orders = [passes(s, pp=pp, vpp=vpp, micro_batches=micro_batches, forward_only=forward_only) for s in range(pp)]
    done: dict[tuple[bool, int, int], float] = {}  # (forward, virtual stage, micro-batch) -> when it ended
    at, clock = [0] * pp, [0.0] * pp
    left, last = sum(map(len, orders)), pp * vpp - 1
    while left:
        progressed = False
        for stage in range(pp):
            while at[stage] < len(orders[stage]):
                one = orders[stage][at[stage]]
                place = one.chunk * pp + stage
                if one.forward:
                    before = (True, place - 1, one.micro_batch) if place else None
                else:
                    before = (False, place + 1, one.micro_batch) if place < last else (True, place, one.micro_batch)
                if before is not None and before not in done:
                    break
                arrived = 0.0 if before is None else done[before]
                source = place - 1 if one.forward else place  # whose hidden states, or whose gradients, came
                if before is not None and before[1] != place and send is not None:
                    arrived += send[source % pp][source // pp]
                start = max(clock[stage], arrived)
                took = (forward if one.forward else backward)[stage][one.chunk]
                clock[stage] = done[one.forward, place, one.micro_batch] = start + took
                at[stage] += 1
                left, progressed = left - 1, True
        assert progressed, f"the schedule of {pp} stages and {vpp} chunks waits for itself"
    busy = [
        sum((forward if one.forward else backward)[stage][one.chunk] for one in order)
        for stage, order in enumerate(orders)
    ]
    return Timeline(max(clock), tuple(busy))


def most_alive(
    order: Sequence[ScheduledPass], saved: Sequence[int], forward_peak: Sequence[int], backward_peak: Sequence[int]
) -> int:
    """Returns the most bytes of activations at once on a stage that goes through `order`.

    Each is of a chunk, in bytes:

    - saved: kept by a micro-batch from its forward to its backward pass
    - forward_peak: the most at once in a forward pass
    - backward_peak: the most at once in a backward pass, with the saved ones
    """
    alive = peak = 0
    keeps = any(not one.forward for one in order)
    for one in order:
        if one.forward:
            peak = max(peak, alive + forward_peak[one.chunk])
            alive += saved[one.chunk] if keeps else 0
        else:
            alive -= saved[one.chunk]
            peak = max(peak, alive + backward_peak[one.chunk])
    return peak
