"""A plan as a table and a picture, for the terminal."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

from mrl.config.command import SAMPLING_RANKS, Phase
from mrl.plan import units
from mrl.plan.memory import RolePlan
from mrl.plan.planner import Plan
from mrl.words import pluralize

_COLUMNS = ("parameters", "gradients", "optimizer", "activations", "cache", "idle")
_MAX_STAGES = 16  # of which rows are shown; of more, those that differ


def lines(plan: Plan) -> Iterator[str]:
    """Yields the lines of the plan."""
    yield f"mrl {plan.command} on {plan.world_size:,} x {plan.gpu.name} ({units.size(plan.gpu.memory)} each)"
    for role in plan.roles.values():
        yield ""
        yield from _picture(role)
    yield ""
    yield from _memory(plan)
    yield ""
    yield verdict(plan)
    for phase in plan.phases.phases:
        if phase.kind == "train" and phase.name in plan.costs:
            yield ""
            yield from _update(plan, phase)
    yield ""
    yield from _step(plan)
    yield ""
    yield from _notes(plan)


def verdict(plan: Plan) -> str:
    """Returns whether it fits, in a line."""
    use = plan.fullest
    where = f"stage {use.stage} in {_in_words(use.phase)}"
    need, room = units.size(use.total), units.size(plan.room)
    kept = f"{units.size(plan.gpu.memory)} less {units.size(plan.reserved)} for CUDA, NCCL, allocator"
    if not plan.fits:
        return f"does not fit: {need} on the fullest GPU ({where}), and there are {room} ({kept})"
    if not plan.whole:
        return f"may fit: {need} of {room} on the fullest GPU before activations of backend fsdp ({where}; {kept})"
    return f"fits: {need} of {room} on the fullest GPU ({where}; {kept})"


def _in_words(phase: str) -> str:
    return phase if phase.startswith(("sampling", "new ")) else f"the {phase}"


def _picture(role: RolePlan) -> Iterator[str]:
    """Yields a line for each stage, with its layers."""
    dims = role.dims
    name = f"{role.role}: " if role.role else ""
    split = ", ".join(
        f"{axis} {size}"
        for axis, size in (("tp", dims.tp), ("cp", dims.cp), ("dp", dims.dp), ("ep", dims.ep), ("etp", dims.etp))
        if size > 1 and not (axis == "etp" and dims.etp == dims.tp)
    )
    sharded = role.config.engine.backend == "fsdp"
    yield f"{name}{dims.describe()}, {role.model}" + (" on backend fsdp" if sharded else f", layers of {role.spec}")
    if sharded:
        copies = role.config.engine.fsdp.replicate
        yield f"  every tensor in {dims.world_size // copies} shards, {pluralize(copies, 'copy', 'copies')}"
        if role.gathered:
            yield f"  weights gathered once a mini-batch, {units.size(role.gathered)} on every rank"
        return
    ranks = dims.world_size // dims.pp
    starts = [role.first_rank + i * ranks for i in range(dims.pp)]
    rows = [(f"stage {i}", f"ranks {at}-{at + ranks - 1}", _held(role, i)) for i, at in enumerate(starts)]
    shown = rows if len(rows) <= _MAX_STAGES else [*rows[:3], ("...", "", ""), *rows[-2:]]
    for stage, where, held in shown:
        yield f"  {stage:<9} {where:<18} {held}"
    if split:
        yield f"  each stage: {split}"
    if role.graph_pool:
        yield f"  graphs of training, {units.size(role.graph_pool)} of the parameters below"


def _held(role: RolePlan, stage: int) -> str:
    chunks = []
    for v, layers in enumerate(role.stages[stage].layers):
        first = role.dims.pp * v + stage == 0
        last = role.dims.pp * v + stage == role.dims.pp * role.dims.vpp - 1
        span = f"layers {layers[0]}-{layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}"
        if first:
            span = f"embedding + {span}"
        if last:
            span = f"{span} + head"
        chunks.append(span)
    return " | ".join(chunks)


def _memory(plan: Plan) -> Iterator[str]:
    columns = [name for name in _COLUMNS if any(getattr(use, name) != 0 for use in plan.uses)]
    scale, unit = units.byte_unit(max(use.total for use in plan.uses))
    head = [f"{unit} on the fullest rank", *columns, "total"]
    rows = []
    for phase in dict.fromkeys(use.phase for use in plan.uses):
        of_phase = [use for use in plan.uses if use.phase == phase]
        for _, run in itertools.groupby(of_phase, key=lambda use: dataclasses.replace(use, stage=0)):
            use, *alike = run
            name = phase
            if alike:
                name += f", stages {use.stage}-{alike[-1].stage}"
            elif len(of_phase) > 1:
                name += f", stage {use.stage}"
            values = [getattr(use, column) for column in columns] + [use.total]
            rows.append([name, *("unknown" if value is None else f"{value / scale:.2f}" for value in values)])
    yield from table([head, *rows])


def _update(plan: Plan, phase: Phase) -> Iterator[str]:
    cost, batches = plan.costs[phase.name], plan.batches[phase.name]
    flops = plan.model_flops.get(phase.role)
    steps = f"{phase.steps} optimizer steps of " if phase.steps > 1 else ""
    count = pluralize(batches.count, "micro-batch", "micro-batches")
    yield f"{phase.name}: {steps}{count} of {pluralize(batches.tokens, 'token')} on each replica"
    yield f"  pipeline bubble {cost.bubble:.1%} (of the schedule alone {cost.even_bubble:.1%})"
    for moved in cost.moved:
        words = moved.op.replace("_", "-")
        where = "inside a node" if moved.link == "node" else "between nodes"
        ranks = pluralize(moved.ranks, "rank")
        yield f"  {moved.group} {words} over {ranks}: {units.size(moved.bytes)} sent a rank, {where}"
    parts = (
        f"pipeline {units.duration(cost.pipeline_s)}, gradients and parameters {units.duration(cost.gradients_s)}, "
        f"optimizer {units.duration(cost.optimizer_s)}"
    )
    yield f"  about {units.duration(cost.seconds)} ({parts})"
    if flops is not None and cost.seconds:
        tokens = phase.sequences * plan.longest / cost.seconds / plan.roles[phase.role].dims.world_size
        mfu = flops * tokens / plan.gpu.flops
        yield f"  {units.flops(flops)} a token (causal attention at half the square, nothing that is computed again)"
        yield f"  {tokens:,.0f} tokens/s a GPU, MFU {mfu:.1%}"


def _step(plan: Plan) -> Iterator[str]:
    """Yields the time of a step, and what it leaves out."""
    if plan.costs:
        timed = [f"{name} {units.duration(cost.seconds)}" for name, cost in plan.costs.items()]
        of = f" ({', '.join(timed)})" if len(timed) > 1 else ""
        yield f"a step: about {units.duration(plan.seconds)}{of}"
        if tokens := plan.phases.served_tokens:
            who = SAMPLING_RANKS if SAMPLING_RANKS in plan.roles else "servers"
            yield (
                f"  {who} sample up to {tokens:,} tokens meanwhile: neither side waits if all together sample "
                f"{tokens / plan.seconds:,.0f} tokens/s"
            )
    if plan.untimed:
        yield f"{'  not in it, as' if plan.costs else 'a step:'} its time is not estimated: {', '.join(plan.untimed)}"


def _notes(plan: Plan) -> Iterator[str]:
    exact = "Parameters, gradients and optimizer are exact."
    if all(role.config.engine.backend == "fsdp" for role in plan.roles.values()):
        yield exact
    else:
        yield f"{exact} Activations are of a real forward and backward pass of"
        yield "every stage on shapes alone, with the longest sequences and tokens spread evenly over experts. Times are"
        yield "estimates: give --efficiency what you measured (docs/plan.md)."
    if plan.has_experts and plan.costs:
        yield "Of experts they are far too short: of an H100's peak a dense model of 1.1 B reached 37 %, and one of"
        yield "1.0 B with 32 experts 2.6 % (docs/evidence/h100.md)."
    yield from plan.phases.notes
    if not plan.whole:
        yield "Of parts on backend fsdp neither activations are planned, nor the weights that are gathered for a"
        yield "block at a time, nor what they send, nor their time: these are in no sum above."


def table(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yields rows with aligned columns, the first to the left."""
    rows = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        yield "  ".join(cells).rstrip()
