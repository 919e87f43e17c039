"""`mrl plan --suggest`: layouts of a run on so many GPUs, those that fit ranked by the time of a step."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mrl.config.command import Part
from mrl.config.megatron_speed import CPU_OFFLOAD_FIELD, moment_bytes, state_bytes
from mrl.errors import UserError
from mrl.mcore_models.layer_spec import DTYPES
from mrl.plan import units
from mrl.plan.gpus import GPU
from mrl.plan.memory import parameters_of
from mrl.plan.planner import Plan
from mrl.plan.show import table
from mrl.weights.hf_config import normalize
from mrl.words import pluralize

MAX_CANDIDATES = 48  # layouts that are built and run, a second or less each
LONG_SEQUENCE = 16384  # tokens from which context parallelism is tried


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """A layout that fits."""

    role: str  # whose layout it is
    overrides: tuple[str, ...]
    plan: Plan


def candidates(part: Part, world_size: int, longest: int, gpu: GPU, room: int) -> list[dict[str, Any]]:
    """Returns engine.parallel of layouts that may fit. Those with the least division of the model come first."""
    hf = normalize(dict(part.hf), where="config.json")
    dense, experts, count = parameters_of(hf, part.head)
    layers = hf["num_hidden_layers"]
    tps = [n for n in _powers(gpu.per_node) if n <= world_size]
    pps = [n for n in _powers(world_size) if n <= layers]
    cps = _powers(8) if longest >= LONG_SEQUENCE else [1]
    eps = [n for n in _powers(world_size) if count % n == 0] if count else [1]
    layouts = []
    for tp, pp, cp, ep in itertools.product(tps, pps, cps, eps):
        per_stage = world_size // pp
        if world_size % (tp * pp * cp) or per_stage % ep:  # etp is 1: ep may span tp, and replicas too
            continue
        state = dense / (tp * pp) * _bytes_of_a_parameter(part, per_stage // tp)
        state += experts / (ep * pp) * _bytes_of_a_parameter(part, per_stage // ep)
        if state > room:
            continue
        for vpp in [1, 2] if pp > 1 and layers >= 2 * pp else [1]:
            degrees = {"tp": tp, "pp": pp, "vpp": vpp, "cp": cp, "ep": ep, "etp": 1 if count else None}
            layouts.append(
                (state / room, {k: v for k, v in degrees.items() if v not in (1, None) or k == "etp" and count})
            )

    # layouts with few model-parallel ranks are faster, those with much room take activations better
    def order(entry: tuple[float, dict[str, Any]]) -> tuple[float, float]:
        share, degrees = entry
        return (math.prod(v for k, v in degrees.items() if k in ("tp", "pp", "cp", "vpp")), share)

    return spread([degrees for _, degrees in sorted(layouts, key=order)], MAX_CANDIDATES)


def spread(entries: Sequence[Any], most: int) -> list[Any]:
    """Returns at most so many entries, in their order: the first half of them, and others evenly up to the last."""
    if len(entries) <= most:
        return list(entries)
    head, rest = list(entries[: most // 2]), entries[most // 2 :]
    count = most - len(head)
    return head + [rest[i * (len(rest) - 1) // (count - 1)] for i in range(count)]


def _bytes_of_a_parameter(part: Part, ranks: int) -> float:
    """Returns bytes of a parameter, its gradient, master and moments on a GPU. `ranks` divide the optimizer.

    State that engine.offload names counts too: in the optimizer's step all of it is on the GPU."""
    item = DTYPES[part.model.dtype].itemsize
    if part.optimizer is None or part.model.lora is not None:
        return item
    megatron_options = part.engine.megatron
    return (
        item
        + 4
        + state_bytes(item, moment_bytes(megatron_options), on_host=bool(megatron_options.get(CPU_OFFLOAD_FIELD)))
        / ranks
    )


def _powers(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length()) if 2**i <= most]


def search(
    plan_of: Callable[[Sequence[str]], Plan], part: Part, layouts: Sequence[Mapping[str, Any]],
    refused: list[UserError], tell: Callable[[str], None] = lambda how_far: None,
) -> Iterator[Suggestion]:  # fmt: skip
    """Yields the layouts that fit. A layout gets full recomputation if it fits only with it.

    - plan_of: overrides -> their plan; raises UserError for a layout that the run would refuse
    - part: the model of these layouts
    - refused: gets the error of each refused layout
    - tell: progress callback
    """
    key = part.key("engine")
    for number, degrees in enumerate(layouts, start=1):
        tell(f"layout {number} of {len(layouts)}")
        text = ", ".join(f"{name}: {value}" for name, value in degrees.items())
        override = f"{key}.parallel={{{text}}}"
        for more in ((), (f"{key}.recompute=full", f"{key}.recompute_modules=null")):
            try:
                made = plan_of([override, *more])
            except UserError as error:
                refused.append(error)
                break
            if made.fits:
                yield Suggestion(part.role, (override, *more), made)
                break


def lines(
    found: Sequence[Suggestion], key: str, own: Sequence[str], world_size: int, gpu: GPU, tried: int,
    refused: int,
) -> Iterator[str]:  # fmt: skip
    """Yields the lines of the table, the fastest layout first.

    - key: of the searched engine
    - own: keys of the other engines, which stay as the config has them
    - tried, refused: numbers of layouts
    """
    where = f"{pluralize(world_size, 'GPU')} ({gpu.name})"
    apart = f" ({refused} refused)" if refused else ""
    if not tried:
        yield f"no layout of {key} fits on {where}: parameters, gradients and optimizer alone are more in each"
        yield "try more GPUs, or a larger one"
        return
    if not found:
        yield f"none of {pluralize(tried, 'layout')} of {key} fits on {where}{apart}"
        yield "try more GPUs, a larger one, engine.offload=[optimizer], smaller micro-batches or shorter sequences"
        return
    best = _ranked(found)[:10]
    rows = [["layout", "fullest GPU", "of", "bubble", "a step", "recompute"]]
    for one in best:
        role = one.plan.roles[one.role]
        bubble = max((cost.bubble for cost in one.plan.costs.values()), default=0.0)
        rows.append([
            role.dims.describe(), units.size(one.plan.fullest.total), units.size(one.plan.room), f"{bubble:.1%}",
            units.duration(one.plan.seconds), role.config.engine.recompute,
        ])  # fmt: skip
    yield f"{len(found)} of {pluralize(tried, 'layout')} of {key} fit on {where}{apart}; the fastest by estimate:"
    yield ""
    yield from table(rows)
    yield ""
    yield "the first one: " + " ".join(f"'{override}'" for override in best[0].overrides)
    if own:
        yield f"searched for {key} alone: {', '.join(own)} stayed as the config has it"
    elif len(best[0].plan.roles) > 1:
        yield f"searched for {key}, which all parts share: one layout for all"
    if best[0].plan.untimed:
        yield f"times are without: {', '.join(best[0].plan.untimed)}"


def as_json(found: Sequence[Suggestion], tried: int, refused: int) -> dict[str, Any]:
    """Returns the layouts that fit as plain data, the fastest first, in bytes and seconds."""
    layouts = [
        {
            "overrides": list(one.overrides), "layout": one.plan.roles[one.role].dims.describe(),
            "bytes": one.plan.fullest.total, "room_bytes": one.plan.room, "step_seconds": one.plan.seconds,
            "untimed_phases": one.plan.untimed,
        }
        for one in _ranked(found)
    ]  # fmt: skip
    return {"tried": tried, "refused": refused, "layouts": layouts}


def _ranked(found: Sequence[Suggestion]) -> list[Suggestion]:
    return sorted(found, key=lambda one: one.plan.seconds)
