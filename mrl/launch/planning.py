"""`mrl plan` at work: reads the config as a run does, without weights, data or GPUs, and prints the plan."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import multiprocessing
import os
import sys
import typing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from mrl.config.command import Config, Part, TrainingCommand, command_of_data
from mrl.config.load import load_config, read_yaml
from mrl.errors import ConfigError, UserError
from mrl.launch import automatic, preflight
from mrl.launch.environment import ranks_here
from mrl.launch.worker import die_with_launcher
from mrl.parallel import ParallelDims
from mrl.trainers.waits import announce, write_error_line

if typing.TYPE_CHECKING:
    from mrl.plan.gpus import GPU
    from mrl.plan.memory import KnownChunks
    from mrl.plan.planner import Plan


_Result = typing.TypeVar("_Result")
_GPUS = "CUDA_VISIBLE_DEVICES"

LIMIT_S = 180.0
"""Seconds after which a process that looks for GPUs or chooses `auto` is ended: imports take long on network disks."""


def run(path: str, overrides: Sequence[str], **options: Any) -> tuple[bool, list[str]]:
    """Returns whether the run fits, or with `suggest` whether a layout does, and lines to show.

    options: those of `_planned`.
    """
    options["visible"] = os.environ.get(_GPUS)
    if _plans_here():
        return _planned(path, overrides, **options)
    return _in_own_process(functools.partial(_planned, path, tuple(overrides), **options))


def _plans_here() -> bool:
    """Returns whether this process makes models without memory already, and so has no other use."""
    devices = sys.modules.get("mrl.ops.devices")
    return devices is not None and devices.device() == devices.META


def _in_own_process(
    function: Callable[..., _Result], *given: Any, visible: str | None = "", limit_s: float | None = None
) -> _Result:
    """Calls a function in a spawned process that sees only the visible GPUs.

    A fork would inherit this process's CUDA state. Raises TimeoutError after `limit_s` seconds, and ends that process.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=_prepare_process, initargs=(visible, os.getpid())) as pool:
        before = set(multiprocessing.active_children())
        future = pool.submit(function, *given)
        try:
            return future.result(limit_s)
        except TimeoutError:
            for child in set(multiprocessing.active_children()) - before:
                child.kill()
            raise


def _prepare_process(visible: str | None, parent: int) -> None:
    """Ends this process with its parent, and sets the GPUs before torch looks for them: megatron would use one.

    visible: None for those that there are.
    """
    die_with_launcher(parent)
    os.environ.pop(_GPUS, None)
    os.environ |= {} if visible is None else {_GPUS: visible}


def _timed(*given: Any) -> Any:
    """Times a stage, in a process that does nothing else."""
    with preflight.quiet():
        from mrl.plan import calibrating

        return calibrating.time_here(*given)


def _planned(
    path: str, overrides: Sequence[str], *, world_size: int, gpu: str, efficiency: float, reserve: float,
    as_json: bool, suggest: bool, calibrate: bool, visible: str | None,
) -> tuple[bool, list[str]]:  # fmt: skip
    """Plans or searches layouts. Returns what `run` returns. From now on this process plans.

    visible: GPUs of a process that times.
    """
    from mrl.plan.gpus import gpu_of

    card = gpu_of(gpu)
    if suggest and calibrate:
        raise UserError("--calibrate", why="times one layout", fix="leave --suggest out, and give a layout it found")
    command = command_of_data(read_yaml(path))
    known: KnownChunks = {}

    def load(more: Sequence[str] = ()) -> Config:
        return load_config(path, [*overrides, *more], command.root)

    def planned(config: Config) -> Plan:
        parts, layouts = read_parts(command, config, world_size)
        with preflight.quiet():
            return planner.plan(
                command, config, parts, layouts, card, reserved_gib=reserve, efficiency=efficiency, known=known
            )

    with announce("planning", shows=True, write=write_error_line) as watch:
        with preflight.quiet():
            from mrl.plan import planner, show

            if suggest:
                planner.prepare()
        if suggest:
            return _suggest(
                command, load(), lambda more: planned(load(more)), world_size, card, reserve, as_json, watch.detail
            )
        config = load()
        preflight.check_engines(command, config)
        config, notes = _plan_numbers(command, config, world_size, card, reserved_gib=reserve)
        if automatic.leaves_backend_open(config):
            choice = "" if config.rollout.ranks else "; a run may choose vllm"
            notes = [*notes, f"{automatic.BACKEND}: auto is planned as native{choice}"]
        made, timed = planned(config), []
        if calibrate:
            from mrl.plan import calibrating

            time_stage = functools.partial(_in_own_process, _timed, visible=visible)
            timed = calibrating.calibrate(made, efficiency, time_stage, watch.detail)
    if as_json:
        content = planner.as_json(made)
        content["notes"] += notes
        content |= {"calibration": calibrating.as_json(timed)} if calibrate else {}
        return made.fits, [json.dumps(content, indent=1)]
    return made.fits, [*show.lines(made), *notes, *(line for one in timed for line in calibrating.lines(made, one))]


def _suggest(
    command: TrainingCommand, config: Config, plan_of: Callable[[Sequence[str]], Plan], world_size: int, card: GPU,
    reserved: float, as_json: bool, tell: Callable[[str], None],
) -> tuple[bool, list[str]]:  # fmt: skip
    """Searches layouts for the first part that trains on megatron; parts without an engine of their own take it too.

    tell: the progress callback.
    """
    from mrl.plan import suggesting

    parts = _with_config_json(command, config)
    trained = [part for part in parts if part.optimizer is not None]
    part = next((part for part in trained if part.engine.backend == "megatron"), None)
    if part is None:
        key = trained[0].key("engine.backend")
        why = "has no layouts to search: it shards over all GPUs"
        raise ConfigError(key, trained[0].engine.backend, why, "leave --suggest out")
    longest, _ = command.longest(config)
    training = command.processes_that_train(config, world_size)
    tried = suggesting.candidates(part, training, longest, card, card.memory - int(reserved * 2**30))
    refused: list[UserError] = []
    found = list(suggesting.search(plan_of, part, tried, refused, tell))
    if tried and len(refused) == len(tried):
        raise refused[-1]
    own = [other.key("engine") for other in parts if other.engine != part.engine]
    if as_json:
        return bool(found), [json.dumps(suggesting.as_json(found, len(tried), len(refused)), indent=1)]
    lines = suggesting.lines(found, part.key("engine"), own, world_size, card, len(tried), len(refused))
    return bool(found), list(lines)


def read_parts(command: TrainingCommand, config: Config, world_size: int) -> tuple[list[Part], list[ParallelDims]]:
    """Returns the models that the run builds, with their config.json, and their layouts, checked against each other."""
    parts = _with_config_json(command, config)
    return parts, preflight.check_layout(command, config, parts, world_size, here=False)


def _with_config_json(command: TrainingCommand, config: Config) -> list[Part]:
    needed = command.needed(config)
    parts = []
    for part in command.parts(config):
        if part.role in needed:
            key, shapes_alone = part.key("model"), dataclasses.replace(part.model, init="random")  # without weights
            hf = preflight.read_model_config(shapes_alone, key, merges=command.merges_adapters)
            here = dataclasses.replace(part.model, path=preflight.config_folder(part.model, key))
            parts.append(dataclasses.replace(part, model=here, hf=hf))
    return parts


def resolve_auto(
    command: TrainingCommand, config: Config, world_size: int, gpus: Callable[[], Sequence[GPU]]
) -> tuple[Any, list[str]]:
    """Returns the config with a number for each `auto`, and lines for the user.

    gpus: returns those of this machine, in a process of its own. This one does not begin to use them.
    """
    from mrl.plan.gpus import gpu_of

    cards: Sequence[GPU] = ()
    shared: list[str] = []
    try:
        if automatic.GPU_VARIABLE in os.environ:
            cards = [gpu_of(os.environ[automatic.GPU_VARIABLE], automatic.GPU_VARIABLE)]
        if not cards and "cpu" not in preflight.devices(command, config):
            cards = _in_own_process(gpus, visible=os.environ.get(_GPUS), limit_s=LIMIT_S)
            here = ranks_here(os.environ)
            sharing = math.ceil(here / max(1, len(cards)))
            cards = [dataclasses.replace(card, memory=card.memory // sharing) for card in cards]
            if cards and sharing > 1:  # or a wrapper shows each rank its own GPU, which this rank cannot know
                seen = f"a node has {here} ranks, and this one sees GPUs: {len(cards)}"
                shared = [f"auto is chosen for 1/{sharing} of a GPU: {seen}"]
        if not cards:
            return automatic.with_defaults(command, config, "no GPU is used")
        card = min(cards, key=lambda gpu: gpu.memory)
        config, lines = _in_own_process(_plan_numbers, command, config, world_size, card, limit_s=LIMIT_S)
        return config, [*lines, *shared]
    except Exception as error:  # of the driver too: no run ends because its plan fails
        return automatic.with_defaults(command, config, automatic.reason(error))


def _plan_numbers(
    command: TrainingCommand, config: Config, world_size: int, card: GPU, **options: float
) -> tuple[Any, list[str]]:
    """Plans a number for each `auto` on a GPU. Returns what `resolve_auto` returns. From now on this process plans.

    options: of `planner.plan`.
    """
    from mrl.plan import planner

    known: KnownChunks = {}
    less = dataclasses.replace(card, memory=int(card.memory * (1 - automatic.MARGIN)))

    def plan(tried: Config) -> Plan:
        parts, layouts = read_parts(command, tried, world_size)
        return planner.plan(command, tried, parts, layouts, less, known=known, **options)

    with preflight.quiet():
        planner.prepare()
        return automatic.with_planned(command, config, plan)


def verdict(command: TrainingCommand, config: Config, world_size: int, card: GPU) -> tuple[bool | None, str]:
    """Returns whether a run fits its GPUs, and a line for the user. None means that it is not known.

    It is planned in a process of its own (`_in_own_process`).
    """
    try:
        return _in_own_process(planned_verdict, command, config, world_size, card)
    except BrokenProcessPool:
        return None, "not planned: its process ended early; mrl plan says why"


def planned_verdict(command: TrainingCommand, config: Config, world_size: int, card: GPU) -> tuple[bool | None, str]:
    """Plans a run. Returns what `verdict` returns. From now on this process plans. A planner's fault stops no job."""
    try:
        with preflight.quiet():
            from mrl.plan import planner, show

            config, lines = _plan_numbers(command, config, world_size, card)
            parts, layouts = read_parts(command, config, world_size)
            made = planner.plan(command, config, parts, layouts, card)
        return made.known_to_fit, "; ".join([show.verdict(made), *lines])
    except Exception as error:
        return None, f"not planned: {automatic.reason(error)}"
