"""`mrl plan` at work: reads the config as a run does, without weights, data or GPUs, and prints the plan."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import typing
from collections.abc import Callable, Sequence

from mrl.config.command import Config, Part, TrainingCommand, command_of_yaml
from mrl.config.load import load_config, read_yaml
from mrl.errors import ConfigError, UserError
from mrl.launch import preflight
from mrl.parallel import ParallelDims

if typing.TYPE_CHECKING:
    from mrl.plan.gpus import GPU
    from mrl.plan.planner import Plan


def run(
    path: str, overrides: Sequence[str], *, world_size: int, gpu: str, efficiency: str | None, reserve: str | None,
    as_json: bool, suggest: bool, echo: Callable[[str], None],
) -> bool:  # fmt: skip
    """Returns whether the run fits; with suggest, whether a layout does."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks for GPUs: megatron would use one
    from mrl.plan.gpus import gpu_of

    card = gpu_of(gpu)
    share, reserved = _number("--efficiency", efficiency, 0.5, 1), _number("--reserve", reserve, 4.0, 1000)
    command = command_of_yaml(read_yaml(path))

    def plan_of(more: Sequence[str] = ()) -> Plan:
        config = load_config(path, [*overrides, *more], command.root)
        parts, layouts = read_parts(command, config, world_size)
        with preflight.quiet():
            return planner.plan(command, config, parts, layouts, card, reserved_gib=reserved, efficiency=share)

    with preflight.quiet():
        from mrl.plan import planner, show

        planner.prepare()
    if suggest:
        return _suggest(command, load_config(path, overrides, command.root), plan_of, world_size, card, reserved, echo)
    made = plan_of()
    for line in [json.dumps(planner.as_json(made), indent=1)] if as_json else show.lines(made):
        echo(line)
    return made.fits


def _suggest(
    command: TrainingCommand, config: Config, plan_of: Callable[[Sequence[str]], Plan], world_size: int, card: GPU,
    reserved: float, echo: Callable[[str], None],
) -> bool:  # fmt: skip
    """Searches layouts for the first part that trains; parts without an engine of their own take the same."""
    from mrl.plan import suggesting

    part = next(part for part in _with_config_json(command, config) if part.optimizer is not None)
    longest, _ = command.longest(config)
    tried = suggesting.candidates(part, world_size, longest, card, card.memory - int(reserved * 2**30))
    found = list(suggesting.search(plan_of, part.key("engine"), tried))
    for line in suggesting.lines(found, world_size, card, len(tried)):
        echo(line)
    return bool(found)


def read_parts(command: TrainingCommand, config: Config, world_size: int) -> tuple[list[Part], list[ParallelDims]]:
    """Returns the models that the run builds, with their config.json, and their layouts, checked against each other."""
    parts = _with_config_json(command, config)
    return parts, preflight.check_layout(command, config, parts, world_size, here=False)


def _with_config_json(command: TrainingCommand, config: Config) -> list[Part]:
    needed = command.needed(config)
    parts = []
    for part in command.parts(config):
        if part.role in needed:
            shapes_alone = dataclasses.replace(part.model, init="random")  # nobody looks for weights then
            parts.append(dataclasses.replace(part, hf=preflight.read_model_config(shapes_alone, part.key("model"))))
    return parts


def verdict(command: TrainingCommand, config: Config, world_size: int, card: GPU) -> tuple[bool | None, str]:
    """Returns whether a run fits its GPUs, None where that is not planned, and a line that says so.

    It is planned in a process of its own: one that plans makes no models for anything else."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def plan_it() -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        try:
            with preflight.quiet():
                from mrl.plan import planner, show

                planner.prepare()
                parts, layouts = read_parts(command, config, world_size)
                made = planner.plan(command, config, parts, layouts, card)
            theirs.send((made.fits, show.verdict(made)))
        except UserError as error:
            theirs.send((None, f"not planned: {error}"))

    child = context.Process(target=plan_it)
    child.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        return None, "not planned: its process ended early; mrl plan says why"
    finally:
        child.join()


def _number(name: str, given: str | None, default: float, most: float) -> float:
    try:
        value = default if given is None else float(given)
    except ValueError:
        value = -1.0
    if not 0 < value <= most:
        raise ConfigError(name, given, "is no number in range", f"give one above 0 and up to {most:g}")
    return value
