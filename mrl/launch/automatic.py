"""Replaces `auto` once in the life of a run: what samples, and on GPUs numbers, the best of a few that a plan says fit.

A run saves them in config.yaml, and a resume takes them from there. Only sections that the config has get one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mrl.config.checks import DEFAULT_TOKENS
from mrl.config.command import Config, TrainingCommand
from mrl.config.keys import join_key, value_at, walk_keys
from mrl.config.load import from_dict, read_yaml, to_dict
from mrl.config.ppo import DEFAULT_CACHE
from mrl.config.ppo_checks import IN_PROCESS_ONLY, NATIVE_ONLY
from mrl.engine.atomic_checkpoint import find_checkpoint
from mrl.errors import ConfigError, UserError, first_line
from mrl.launch import preflight
from mrl.rollout import vllm_start

if TYPE_CHECKING:
    from mrl.plan.planner import Plan

C = TypeVar("C", bound=Config)

TOKENS, CACHE = "engine.micro_batch.tokens", "rollout.cache_tokens"
BACKEND = vllm_start.KEY
GPU_VARIABLE = "MRL_PLAN_GPU"
"""A GPU as `mrl plan --gpu` names it, for which `auto` is chosen in place of this machine's."""
MOST_TOKENS = 32768
MARGIN = 0.1
"""The share of a GPU's memory that stays free beside what a plan reserves: activations are planned to within 10 %."""
TIE = 0.01
"""Times that differ by a smaller share are equal: plans are not more precise."""


def auto_keys(config: Config) -> list[str]:
    """Returns the dotted keys that are `auto` and get a number."""

    def walk(data: Mapping[str, Any], path: str) -> list[str]:
        found = []
        for name, value in data.items():
            key = join_key(path, name)
            if isinstance(value, Mapping):
                found += walk(value, key)
            elif value == "auto" and (key == CACHE or f".{key}".endswith(f".{TOKENS}")):
                found.append(key)
        return found

    return walk(to_dict(config), "")


def replaced(config: C, values: Mapping[str, Any]) -> C:
    """Returns the config with other values at some keys, checked. Roles that inherit a section still do."""
    if not values:
        return config
    data = to_dict(config)
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        value_at(data, section)[name] = value
    return from_dict(data, type(config))


def resumed_yaml(config: Config) -> tuple[Path, Mapping[str, Any]] | None:
    """Returns the config.yaml around the checkpoint that a run resumes, and its content; None if there is none."""
    checkpoint = getattr(config, "checkpoint", None)
    if checkpoint is None or checkpoint.resume == "never":
        return None
    with contextlib.suppress(UserError), preflight.quiet():  # the checks after this one say what is damaged
        for folder in (f"{config.output_dir}/checkpoints", checkpoint.resume):
            found = None if folder == "auto" else find_checkpoint(folder)
            if found is not None:
                file = Path(found).absolute().parents[1] / "config.yaml"
                return file, read_yaml(file)
    return None


def leaves_backend_open(config: Any) -> bool:
    """Returns whether what samples is `auto`. Not all commands sample."""
    return getattr(config, "rollout", None) is not None and config.rollout.backend == "auto"


def with_backend(command: TrainingCommand, config: C, sees_gpu: Callable[[], bool]) -> tuple[C, list[str]]:
    """Returns the config with what samples in place of `auto`, and a line on why. It has keys of what samples alone.

    A resume takes that of its run. sees_gpu: whether this process does; called if all else is there for vLLM.
    """
    if not leaves_backend_open(config):
        return config, []
    saved = resumed_yaml(config)
    if saved is not None and not value_at(saved[1], "rollout.server.urls"):
        name = value_at(saved[1], BACKEND)
        with contextlib.suppress(ConfigError):  # keys that another run had not
            if name in ("native", "vllm"):
                return sampled_by(config, name), [f"{BACKEND}: auto is {name}, as in {saved[0]}"]
    lacking = _lacks_for_vllm(command, config, sees_gpu)
    name, why = ("vllm", "as all that it needs is here") if lacking is None else ("native", f"because {lacking}")
    return sampled_by(config, name), [f"{BACKEND}: auto is {name}, {why}"]


def _lacks_for_vllm(command: TrainingCommand, config: Config, sees_gpu: Callable[[], bool]) -> str | None:
    """Returns why vLLM cannot sample in the trainer's processes, or not well; None if it can."""
    if "cpu" in preflight.devices(command, config):
        return "the actor is on a CPU"
    version = vllm_start.installed()
    if version is None:
        return "vLLM is not installed beside mrl"
    outside = vllm_start.untested(version)
    if outside is not None:
        return outside
    if vllm_start.is_for_cpus():
        return "vLLM here is a build for CPUs"
    try:
        from mrl.rollout.vllm import check_sampling  # it imports torch

        check_sampling(sampled_by(config, "vllm").rollout)
    except ConfigError as error:
        return first_line(error)
    return None if sees_gpu() else "torch sees no GPU"


def sampled_by(config: Any, backend: str) -> Any:
    """Returns the config with a backend, and the defaults of keys that the other one alone reads."""
    unread = [f"rollout.{name}" for name in NATIVE_ONLY]
    if backend == "native":
        unread = [] if config.rollout.ranks else [f"rollout.server.{name}" for name in IN_PROCESS_ONLY]
    defaults = {key.path: key.default for key in walk_keys(type(config)) if key.path in unread}
    return replaced(config, defaults | {BACKEND: backend})


def with_saved(command: TrainingCommand, config: C) -> tuple[C, list[str]]:
    """Returns the config with numbers of the run that this one resumes, and a line for each. A number for shorter
    sequences is not taken."""
    keys = auto_keys(config)
    saved = resumed_yaml(config) if keys else None
    if saved is None:
        return config, []
    file, before = saved
    found = {key: number for key in keys if type(number := value_at(before, key)) is int}
    numbers = {key: number for key, number in found.items() if number >= _longest(command, config, key)}
    return replaced(config, numbers), [f"{key}: auto is {n:,}, as in {file}" for key, n in numbers.items()]


def _longest(command: TrainingCommand, config: Config, key: str) -> int:
    """Returns the least number that a key may have."""
    return command.longest(config)[0] if key == CACHE else command.longest_group(config)


def _default(command: TrainingCommand, config: Config, key: str) -> int:
    return max(DEFAULT_CACHE if key == CACHE else DEFAULT_TOKENS, _longest(command, config, key))


def with_defaults(
    command: TrainingCommand, config: C, why: str, keys: Sequence[str] | None = None
) -> tuple[C, list[str]]:
    """Returns the config with the default at each key, and a line for each. keys: None for all."""
    numbers = {key: _default(command, config, key) for key in (auto_keys(config) if keys is None else keys)}
    lines = [f"{key}: auto is the default, {number:,}, because {why}" for key, number in numbers.items()]
    return replaced(config, numbers), lines


def with_planned(command: TrainingCommand, config: C, plan: Callable[[C], Plan]) -> tuple[C, list[str]]:
    """Returns the config with the best number that fits at each key, and a line for each.

    plan: of a config, on GPUs less `MARGIN`. Its faults stop no run, which takes the default then.
    """
    lines = []
    for key in auto_keys(config):
        try:
            number, why = _best(command, config, key, plan)
            config, says = replaced(config, {key: number}), [f"{key}: auto is {number:,}, {why}"]
        except Exception as error:
            config, says = with_defaults(command, config, reason(error), [key])
        lines += says
    return config, lines


def reason(error: Exception) -> str:
    """Returns an error in a line, with its type unless it is for users."""
    return ("" if isinstance(error, UserError) else f"{type(error).__name__}: ") + first_line(error)


def _best(command: TrainingCommand, config: C, key: str, plan: Callable[[C], Plan]) -> tuple[int, str]:
    """Returns the best number that fits at a key, and why it is.

    The cache is the largest one. Micro-batches are the largest of those that take the least time. Below the default it
    is the largest that fits. Only the phases that the key changes count.
    """
    if command.on_rows(config) is None:
        raise UserError(f"the batches of mrl {command.name} are its clients'")
    longest, default = _longest(command, config, key), _default(command, config, key)
    names, most = _phases_and_limit(command, config, key, plan, longest)

    def seconds(number: int) -> float | None:
        """Returns the time of the phases, 0 of sampling; None if the number does not fit."""
        made = plan(replaced(config, {key: number}))
        uses = [use for use in made.uses if use.phase in names]
        if not uses or any(use.activations is None for use in uses):
            raise UserError("mrl plan does not know what it takes")
        if any(use.total > made.room for use in uses):
            return None
        return 0.0 if key == CACHE else sum(made.costs[name].seconds for name in names)

    fits = f"the most tried that leaves {MARGIN:.0%} of a GPU free by mrl plan"
    least = seconds(default)
    if least is None:
        for number in (default // 2**i // longest * longest for i in range(1, default.bit_length())):
            if number and seconds(number) is not None:
                return number, fits
        raise UserError(f"by mrl plan not even {longest:,} fit")
    tried, most_because = {default: least}, ""
    for number in _above(default, most, longest):
        took = seconds(number)
        if took is None:
            most_because = fits
            break
        tried[number] = took
    if key == CACHE:
        best = max(tried)
        return best, "enough for all sequences of a step" if best >= most else most_because
    best = max(number for number, took in tried.items() if took <= min(tried.values()) * (1 + TIE))
    if most_because and best == max(tried):
        return best, most_because
    return best, "the most that takes the least time by mrl plan"


def _phases_and_limit(
    command: TrainingCommand, config: C, key: str, plan: Callable[[C], Plan], longest: int
) -> tuple[list[str], int]:
    """Returns the names of the phases that a key changes, and the most that is tried at the key.

    The phases are those of the roles with its section, or sampling. longest: the least number that the key may have.
    """
    phases = [phase for phase in command.phases(config).phases if (phase.kind == "sample") == (key == CACHE)]
    if key == CACHE:
        layouts = [plan(config).roles[phase.role].dims for phase in phases]
        rows = [-(-phase.sequences // (dims.dp * dims.cp)) for phase, dims in zip(phases, layouts, strict=True)]
        return [phase.name for phase in phases], max(rows, default=0) * longest
    both = zip(command.parts(config), command.parts(replaced(config, {key: longest})), strict=True)
    roles = [part.role for part, changed in both if part.engine != changed.engine]
    return [phase.name for phase in phases if phase.role in roles], MOST_TOKENS // longest * longest


def _above(default: int, most: int, longest: int) -> list[int]:
    """Returns numbers above the default, up to the most: few, since each is planned."""
    factors = sorted(2**i * factor for i in range(most.bit_length()) for factor in (2, 3))
    numbers = [default * factor // longest * longest for factor in factors]
    return [number for number in numbers if number < most] + [most] * (most > default)
