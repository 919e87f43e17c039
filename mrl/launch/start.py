"""Starts a command that trains: checks what can be checked before any process starts, and runs its trainer."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import pkgutil
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mrl.config.command import Config, Part, TrainingCommand
from mrl.config.keys import value_at
from mrl.config.load import dump_config, load_config, to_dict
from mrl.errors import ConfigError, UserError
from mrl.launch import automatic, preflight, showing
from mrl.launch.environment import JoinedWorld, generation_of_gpus, interface_towards, joined_world, variables_to_set
from mrl.launch.worker import log_path, warnings_in
from mrl.rollout import vllm_start
from mrl.trainers import run_lock
from mrl.trainers.waits import announce, write_line

if TYPE_CHECKING:
    from mrl.parallel import ParallelDims
    from mrl.plan.gpus import GPU
    from mrl.trainers.used_folder import ResumePoint

C = TypeVar("C", bound=Config)

LOADING = "loading PyTorch and what goes with it"


def start(
    command: TrainingCommand, *, config_path: str, overrides: Sequence[str], nproc: int | None, dry_run: bool
) -> int | None:
    """Runs `mrl NAME`. If torchrun or srun has started this process, it is one of the run's ranks.

    Returns 1 if a rank ended by a fault of mrl, after printing it.
    """
    joined = joined_world(os.environ)
    given = config = load_config(config_path, overrides, command.root)
    if "cpu" in preflight.devices(command, config):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # megatron computes on a GPU wherever it sees one
    shows = not dry_run and config.log.console != "none" and (joined is None or joined.rank == 0)
    config, chosen = automatic.with_backend(command, config, _sees_gpu)
    saved = preflight.check_used(command, config)
    auto = [automatic.BACKEND] * len(chosen) + automatic.auto_keys(config)
    config, kept = automatic.with_saved(command, config)
    kept = [*chosen, *kept]
    if saved is not None and saved.is_complete and not dry_run:
        if shows:
            write_line(saved.message)
        return None
    with announce("checking files and layout", shows=shows):
        if not dry_run and joined is None:  # ranks of another launcher refuse together, once they have met
            run_lock.refuse_if_in_use(Path(config.output_dir))
        parts = preflight.check_files(command, config)
        if joined is not None and nproc is not None:
            raise ConfigError("--nproc", nproc, f"has no effect under {joined.launcher}", "leave it out")
        if joined is None:
            world_size = choose_nproc(parts, nproc, here=not dry_run, beside=command.processes_beside(config))
        else:
            world_size = joined.world_size
        layouts = preflight.check_layout(command, config, parts, world_size, here=not dry_run)
    if dry_run:
        _show(command, config, parts, layouts, world_size, saved)
        for line in chosen:
            print(f"# {line} (as it is here)", flush=True)
        return None
    if _has_vllm_inside(config):
        vllm_start.check_version()
    for note in preflight.position_notes(command, config, parts) if shows else ():
        write_line(note)
    command_line = shlex.join(["mrl", *sys.argv[1:]])
    if "cpu" not in preflight.devices(command, config):
        os.environ |= variables_to_set(
            parts, layouts, os.environ, generates=command.generates, generation=generation_of_gpus()
        )
    if joined is not None:
        join(joined)
    with announce("choosing what is auto", shows=shows):
        config, lines, _store = _auto_of_rank_0(command, config, given, auto, world_size, joined)
    for line in (*kept, *lines) if shows else ():
        write_line(line)
    if joined is not None:
        with warnings_in(log_path(os.path.join(config.output_dir, "logs"), joined.rank)):
            with announce(LOADING, shows=shows):
                run = trainer_of(command)
            run(config, command_line)
        return None
    return _start_processes(command, config, command_line, world_size, shows)


def _show(
    command: TrainingCommand, config: Config, parts: Sequence[Part], layouts: Sequence[ParallelDims], world_size: int,
    saved: ResumePoint | None,
) -> None:  # fmt: skip
    """Prints the lines of a dry run. saved: where the run would resume."""
    preflight.check_code(command, config)
    notes = showing.notes(command, config)
    lines = [*_notes(parts, layouts), *preflight.position_notes(command, config, parts)]
    lines += command.describe(config, parts, layouts)
    if saved is not None:
        lines.append(saved.message)
    print(dump_config(config), end="")
    for line in (*lines, *(f"data: {note}" for note in notes)):
        print(f"# {line}", flush=True)
    memory = _memory(command, config, world_size)
    if memory is not None:
        print(f"# memory: {memory}", flush=True)


def _notes(parts: Sequence[Part], layouts: Sequence[ParallelDims]) -> Iterator[str]:
    """Yields what each part's engine says of its choices."""
    from mrl.engine.registry import checks_of

    for part, dims in zip(parts, layouts, strict=True):
        for note in checks_of(part.engine.backend).notes_on(part.model, part.used_engine, dims, part.hf):
            yield part.key(note)


def _auto_of_rank_0(
    command: TrainingCommand, config: C, given: C, auto: Sequence[str], world_size: int, joined: JoinedWorld | None
) -> tuple[C, list[str], Any]:
    """Returns the config without `auto`, lines about its numbers, and a store to keep until the run ends.

    Rank 0 of another launcher chooses, and the others take what it chose: their GPUs or their view of config.yaml may
    differ. auto: the keys that were `auto` on this rank. given: the config before what samples was chosen here.
    """

    def chosen() -> tuple[C, list[str]]:
        if not automatic.auto_keys(config):
            return config, []
        from mrl.launch import planning

        return planning.resolve_auto(command, config, world_size, _gpus)

    if joined is None or not auto:
        return *chosen(), None
    import torch.distributed as dist

    from mrl.engine.collective import JOIN_TIMEOUT

    store, _, _ = next(dist.rendezvous("env://", timeout=JOIN_TIMEOUT))
    lines: list[str] = []
    if joined.rank == 0:
        try:
            made, lines = chosen()
        except UserError as error:
            store.set("auto", json.dumps(str(error)))
            with contextlib.suppress(dist.DistStoreError):  # the store ends with rank 0
                store.wait([f"auto read by {rank}" for rank in range(1, world_size)], datetime.timedelta(seconds=10))
            raise
        store.set("auto", json.dumps({key: value_at(to_dict(made), key) for key in auto}))
    answer = json.loads(store.get("auto"))
    if isinstance(answer, str):
        store.set(f"auto read by {joined.rank}", "")
        raise UserError(f"rank 0 could not choose what is auto: {answer}")
    if joined.rank and (backend := answer.get(automatic.BACKEND)) is not None:
        config = automatic.sampled_by(given, backend)
    return automatic.replaced(config, answer), lines, store


def _has_vllm_inside(config: Any) -> bool:
    """Returns whether vLLM samples in the trainer's processes. Not all commands sample."""
    rollout = getattr(config, "rollout", None)
    return rollout is not None and rollout.vllm_inside


def _memory(command: TrainingCommand, config: Config, world_size: int) -> str | None:
    """Returns whether the run fits the GPUs of this machine, or the one that MRL_PLAN_GPU names, in words; None without
    one."""
    named = os.environ.get(automatic.GPU_VARIABLE)
    if named is not None:
        from mrl.plan.gpus import gpu_of

        card = gpu_of(named, automatic.GPU_VARIABLE)
    else:
        gpus = [] if "cpu" in preflight.devices(command, config) else _gpus()
        if not gpus:
            return None
        card = gpus[0]
    from mrl.launch import planning

    return planning.verdict(command, config, world_size, card)[1]


def _sees_gpu() -> bool:
    import torch

    return torch.cuda.device_count() > 0  # without beginning to use one


def _gpus() -> list[GPU]:
    """Returns the GPUs that this process sees."""
    import torch

    from mrl.kernels.operators import CAN_COMPILE
    from mrl.plan.gpus import gpu_here
    from mrl.trainers.throughput import peak_of

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        gpu_here(one.name, one.total_memory, peak_of(one.name), (one.major, one.minor), CAN_COMPILE) for one in gpus
    ]


def join(joined: JoinedWorld) -> None:
    """Sets the variables of another launcher by which torch.distributed finds this process."""
    os.environ.update(joined.variables)
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    name = interface_towards(os.environ["MASTER_ADDR"])
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name


def choose_nproc(parts: Sequence[Part], asked: int | None, *, here: bool = True, beside: int = 0) -> int:
    """Returns how many processes a run of these models starts on this machine. beside: those that do not train."""
    gpus = 0
    if all(part.engine.device != "cpu" for part in parts):
        import torch

        gpus = torch.cuda.device_count()
    for part in parts if here and not gpus else ():
        if part.engine.device == "cuda":  # the engines say the same of a process that torchrun or srun started
            key = part.key("engine.device")
            raise ConfigError(key, "cuda", "needs a GPU, and torch sees none", "use auto or cpu")
    needed = preflight.needed_processes(parts) + beside
    return preflight.choose_nproc(asked, gpus=gpus, needed=needed, here=here)


def _start_processes(
    command: TrainingCommand, config: Config, command_line: str, nproc: int, shows: bool
) -> int | None:
    """Runs the trainer in `nproc` processes on this machine: in this one where one suffices. Returns the exit code."""
    with announce(LOADING, shows=shows):
        from mrl.launch import local

    def run(*given: Any) -> None:
        with announce(LOADING, shows=shows):  # here, where warnings of its imports go to the log
            trainer = trainer_of(command)
        trainer(*given)

    try:
        if nproc == 1:
            local.run_here(run, config, command_line, log_dir=Path(config.output_dir) / "logs")
        else:
            logs = local.logs_of(config)
            local.launch(command.trainer, config, command_line, nproc, log_dir=logs, quiet=config.log.console == "none")
    except local.RankFailed as failure:
        print(f"mrl: {failure}", file=sys.stderr, flush=True)
        return 1
    return None


def trainer_of(command: TrainingCommand) -> Callable[[Any, str], None]:
    """Returns the function that trains."""
    function: Callable[[Any, str], None] = pkgutil.resolve_name(command.trainer)
    return function
