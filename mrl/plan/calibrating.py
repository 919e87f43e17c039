"""`mrl plan --calibrate`: times of an update's stages on this machine, beside the plan's estimates.

Collectives are left out of the times, because one process has nobody to send to.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import psutil
import torch

from mrl.config.command import Phase
from mrl.config.schema import RoleConfig
from mrl.engine.megatron import meta
from mrl.engine.megatron.stage_times import StageTimes, time_stage
from mrl.errors import ConfigError, UserError
from mrl.ops import devices
from mrl.parallel import ParallelDims
from mrl.plan import units
from mrl.plan.cost import Cost, cost, estimated_times
from mrl.plan.memory import RolePlan, without_padding_and_graphs
from mrl.plan.planner import Plan
from mrl.plan.show import table


@dataclasses.dataclass(frozen=True)
class Timed:
    """An update with the times of its stages, estimated or measured."""

    stages: list[StageTimes]
    alone: Cost  # without collectives
    whole: Cost  # with collectives as the plan estimates them


@dataclasses.dataclass(frozen=True)
class Calibration:
    """An update as it is planned, and as this machine computes it."""

    phase: Phase
    where: str  # the device and the layer spec
    efficiency: float  # at which matrix products would take as long as measured
    estimated: Timed
    measured: Timed


def calibrate(
    made: Plan, efficiency: float, run: Callable[..., tuple[StageTimes, str]], tell: Callable[[str], None]
) -> list[Calibration]:
    """Times every update. Stages with the same layers are timed once.

    - efficiency: of the plan
    - run: calls `time_here` with its arguments in a new process
    - tell: progress callback
    """
    found = []
    for phase in made.phases.phases:
        if phase.kind != "train":
            continue
        role, lengths = made.roles[phase.role], made.batches[phase.name].lengths
        _check(phase, role)
        config = dataclasses.replace(role.config, engine=without_padding_and_graphs(role.config))
        kinds, times = meta.kinds_of_stages(config, role.dims), {}
        for stage, kind in enumerate(kinds):
            if kind.same not in times:
                tell(f"timing stage {stage} in the {phase.name}")
                rank = stage * (role.dims.world_size // role.dims.pp)
                [needed] = [use.total for use in made.uses if (use.phase, use.stage) == (phase.name, stage)]
                try:
                    times[kind.same] = run(config, role.dims, rank, lengths, made.phases.entropy, needed)
                except (BrokenProcessPool, RuntimeError) as error:
                    raise _failed(f"stage {stage} found too little memory here, or failed: {error}") from error
        where = times[kinds[0].same][1]
        estimated = _with_costs(made, phase, estimated_times(role.trains, made.gpu, efficiency))
        measured = _with_costs(made, phase, [times[kind.same][0] for kind in kinds])
        share = efficiency * estimated.alone.pipeline_s / measured.alone.pipeline_s
        found.append(Calibration(phase, where, share, estimated, measured))
    return found


def _check(phase: Phase, role: RolePlan) -> None:
    key = f"{phase.role}.engine.backend" if phase.role else "engine.backend"
    if role.config.engine.backend == "fsdp":
        why = "has no stages to time: all GPUs gather each block together"
        raise ConfigError(key, "fsdp", why, "leave --calibrate out, or take megatron")
    if phase.distill is not None:
        raise UserError("--calibrate", why="does not time an update that learns from a teacher", fix="leave it out")


def _with_costs(made: Plan, phase: Phase, times: list[StageTimes]) -> Timed:
    role, batches = made.roles[phase.role], made.batches[phase.name]
    alone = dataclasses.replace(made.gpu, link=math.inf, network=math.inf)
    costs = (cost(role, role.trains, batches, gpu, steps=phase.steps, times=times) for gpu in (alone, made.gpu))
    return Timed(times, *costs)


def time_here(
    config: RoleConfig, dims: ParallelDims, rank: int, lengths: Sequence[int], entropy: str, needed: int
) -> tuple[StageTimes, str]:
    """Returns the result of `time_stage`, or refuses a stage that does not fit into this machine's memory.

    needed: bytes of the stage, by the plan.
    """
    on_gpu = devices.device_type(config.engine.device) == "cuda"
    free = torch.cuda.mem_get_info()[0] if on_gpu else psutil.virtual_memory().available
    stage = dims.coordinates(rank).pp_rank
    if needed > free:
        why = f"stage {stage} needs {units.size(needed)}, and {units.size(free)} are free here"
        raise _failed(why)
    return time_stage(config, dims, rank, lengths, entropy)


def _failed(why: str) -> UserError:
    return UserError("--calibrate", why=why, fix="divide the model more, or give smaller micro-batches")


def lines(made: Plan, one: Calibration) -> Iterator[str]:
    """Yields the lines of the table."""
    both = one.estimated, one.measured
    rows = [[f"{one.phase.name}, collectives left out", f"estimate for {made.gpu.name}", "measured"]]

    def add(name: str, seconds: Sequence[float]) -> None:
        rows.append([f"  {name}", *map(units.duration, seconds)])

    shown: list[StageTimes] = []
    for i, stage in enumerate(one.measured.stages):
        if any(stage is other for other in shown):
            continue
        shown.append(stage)
        like = sum(stage is other for other in one.measured.stages) - 1
        for chunk in range(len(stage.forward)):
            name = f"stage {i}" + (f", chunk {chunk}" if len(stage.forward) > 1 else "")
            name += f" (and {like} like it)" if like else ""
            add(f"{name}: forward of a micro-batch", [of.stages[i].forward[chunk] for of in both])
            add(f"{name}: backward", [of.stages[i].backward[chunk] for of in both])
        add(f"stage {i}: optimizer step", [of.stages[i].optimizer for of in both])
    add("a step without collectives", [of.alone.seconds for of in both])
    gpus = made.roles[one.phase.role].dims.world_size
    rates = [one.phase.sequences * made.longest / of.alone.seconds / gpus for of in both]
    rows.append(["  tokens/s a GPU without collectives", *(f"{rate:,.0f}" for rate in rates)])
    add("a step with collectives as estimated", [of.whole.seconds for of in both])
    yield ""
    yield from table(rows)
    sent = sorted({f"{moved.group} {moved.op.replace('_', '-')}" for moved in one.measured.whole.moved})
    yield f"  measured on {one.where}"
    yield f"  left out: {', '.join(sent) if sent else 'nothing, as no rank sends'}"
    if one.efficiency <= 1:
        yield f"  matrix products of the plan take as long with --efficiency {one.efficiency:.2g}"


def as_json(found: Sequence[Calibration]) -> dict[str, Any]:
    """Returns the times as plain data, in seconds."""

    def plain(of: Timed) -> dict[str, Any]:
        return {
            "stages": [dataclasses.asdict(stage) for stage in of.stages],
            "seconds_without_collectives": of.alone.seconds, "seconds": of.whole.seconds,
        }  # fmt: skip

    return {
        one.phase.name: {
            "where": one.where, "efficiency": one.efficiency, "estimated": plain(one.estimated),
            "measured": plain(one.measured),
        }
        for one in found
    }  # fmt: skip
