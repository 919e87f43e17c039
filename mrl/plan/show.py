"""A plan as a table and a picture, for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from mrl.plan.memory import RolePlan, Use
from mrl.plan.planner import Plan

GIB = 2**30
_COLUMNS = ("parameters", "gradients", "optimizer", "activations", "cache", "idle")
_MOST_STAGES = 16  # of which rows are shown; of more, those that differ


def lines(plan: Plan) -> Iterator[str]:
    """Yields the lines of the plan."""
    yield f"mrl {plan.command} on {plan.world_size:,} x {plan.gpu.name} ({plan.gpu.memory / GIB:.1f} GiB each)"
    for role in plan.roles.values():
        yield ""
        yield from _picture(role)
    yield ""
    yield from _memory(plan)
    yield ""
    yield verdict(plan)
    for phase in plan.phases.phases:
        if phase.kind == "train":
            yield ""
            yield from _update(plan, phase.name, phase.role)
    yield ""
    yield from _notes(plan)


def verdict(plan: Plan) -> str:
    """Returns whether it fits, in a line."""
    use = plan.fullest
    where = f"stage {use.stage} in the {use.phase}"
    need, room, reserved = use.total / GIB, plan.room / GIB, plan.reserved / GIB
    kept = f"{plan.gpu.memory / GIB:.1f} GiB less {reserved:g} for CUDA, NCCL and the allocator"
    if plan.fits:
        return f"fits: {need:.1f} of {room:.1f} GiB on the fullest GPU ({where}; {kept})"
    return f"does not fit: {need:.1f} GiB on the fullest GPU ({where}), and there are {room:.1f} ({kept})"


def _picture(role: RolePlan) -> Iterator[str]:
    """What each stage holds."""
    dims = role.dims
    name = f"{role.role}: " if role.role else ""
    split = ", ".join(
        f"{axis} {size}"
        for axis, size in (("tp", dims.tp), ("cp", dims.cp), ("dp", dims.dp), ("ep", dims.ep), ("etp", dims.etp))
        if size > 1 and not (axis == "etp" and dims.etp == dims.tp)
    )
    yield f"{name}{dims.describe()}, {role.config.model.path}"
    ranks = dims.world_size // dims.pp
    rows = [(f"stage {i}", f"ranks {i * ranks}-{(i + 1) * ranks - 1}", _held(role, i)) for i in range(dims.pp)]
    shown = rows if len(rows) <= _MOST_STAGES else [*rows[:3], ("...", "", ""), *rows[-2:]]
    for stage, where, held in shown:
        yield f"  {stage:<9} {where:<18} {held}"
    if split:
        yield f"  each stage: {split}"


def _held(role: RolePlan, stage: int) -> str:
    chunks = []
    for v, layers in enumerate(role.stages[stage].layers):
        first = role.dims.pp * v + stage == 0
        last = role.dims.pp * v + stage == role.dims.pp * role.dims.vpp - 1
        span = f"layers {layers[0]}-{layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}"
        chunks.append(" + ".join(["embedding"] * first + [span] + ["head"] * last))
    return " | ".join(chunks)


def _memory(plan: Plan) -> Iterator[str]:
    columns = [name for name in _COLUMNS if any(getattr(use, name) for use in plan.uses)]
    head = ["GiB on the fullest rank", *columns, "total"]
    rows = []
    for phase in dict.fromkeys(use.phase for use in plan.uses):
        of_phase = [use for use in plan.uses if use.phase == phase]
        for use in _differing(of_phase):
            name = phase if len(of_phase) == 1 else f"{phase}, {_stages_like(use, of_phase)}"
            values = [f"{getattr(use, column) / GIB:.2f}" for column in columns]
            rows.append([name, *values, f"{use.total / GIB:.2f}"])
    yield from table([head, *rows])


def _figures(use: Use) -> tuple[int, ...]:
    return tuple(getattr(use, name) for name in _COLUMNS)


def _differing(uses: Sequence[Use]) -> list[Use]:
    """Returns the first of each run of stages that hold the same."""
    return [use for i, use in enumerate(uses) if i == 0 or _figures(use) != _figures(uses[i - 1])]


def _stages_like(use: Use, uses: Sequence[Use]) -> str:
    last = use.stage
    while last + 1 < len(uses) and _figures(uses[last + 1]) == _figures(use):
        last += 1
    return f"stage {use.stage}" if last == use.stage else f"stages {use.stage}-{last}"


def _update(plan: Plan, name: str, role: str) -> Iterator[str]:
    cost, batches = plan.costs[name], plan.batches[name]
    flops = plan.model_flops.get(role)
    yield f"{name}: {batches.count} micro-batches of {batches.tokens:,} tokens on each replica"
    yield f"  pipeline bubble {cost.bubble:.1%} (of the schedule alone {cost.even_bubble:.1%})"
    for moved in cost.moved:
        words = moved.op.replace("_", "-")
        where = "inside a node" if moved.link == "node" else "between nodes"
        yield f"  {moved.group} {words} over {moved.ranks} ranks: {moved.bytes / GIB:.2f} GiB sent a rank, {where}"
    parts = f"pipeline {cost.pipeline_s:.2f}, gradients and parameters {cost.gradients_s:.2f}"
    yield f"  about {cost.seconds:.2f} s ({parts}, optimizer {cost.optimizer_s:.2f})"
    if flops is not None and cost.seconds:
        tokens = plan.step_tokens / cost.seconds / plan.world_size
        mfu = flops * tokens / plan.gpu.flops
        yield f"  {flops / 1e9:.2f} GFLOPs a token, {tokens:,.0f} tokens/s a GPU, MFU {mfu:.0%}"


def _notes(plan: Plan) -> Iterator[str]:
    yield "Parameters, gradients and optimizer are exact. Activations are of a real forward and backward pass of"
    yield "every stage on shapes alone, with the longest sequences and tokens spread evenly over experts. Times are"
    yield "estimates: give --efficiency what you measured (docs/plan.md)."


def table(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yields rows with aligned columns, the first to the left."""
    rows = [list(row) for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        first, *others = (
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join([first, *others]).rstrip()
