"""A config against the allocation that it is to run on: before anything is submitted."""

from __future__ import annotations

import os
import pathlib
import re
import statistics
from collections.abc import Collection, Sequence

from mrl import metrics
from mrl.config.command import Config, Part, RowsRunConfig, Server, TrainingCommand
from mrl.errors import ConfigError, quoted
from mrl.launch import preflight
from mrl.launch.slurm.options import SlurmConfig, seconds_of
from mrl.launch.slurm.render import reads_of
from mrl.parallel import ParallelDims
from mrl.words import pluralize

RECENT_STEPS = 20


def check_job(command: TrainingCommand, config: Config, options: SlurmConfig, *, there: bool = True) -> list[str]:
    """Raises a UserError if the run could not start, or would not end, in the job. Returns warnings.

    Files are checked from here, because this machine sees the same as the nodes.

    there: weights and rows must exist; False for a script that is only printed.
    """
    _check_devices(preflight.devices(command, config), options)
    rows = command.on_rows(config)
    if rows is not None:
        _check_restarts(rows, options)
    parts = preflight.check_files(command, config, there=there)
    try:
        layouts = preflight.check_layout(command, config, parts, options.world_size, here=False)
    except ConfigError as error:
        nodes = f"{pluralize(options.nodes, 'node')} of {options.per_node}"
        if error.key is None:  # a package's engine may raise an error of one text
            raise ConfigError(f"{error} ({nodes})") from None
        raise ConfigError(error.key, error.value, error.why, f"{error.fix} ({nodes})") from None
    preflight.check_code(command, config)
    return [
        *_across_nodes(parts, layouts, options),
        *_check_cores(options),
        *(_check_time(rows, options) if rows is not None else ()),
    ]


def check_template(config: Config, options: SlurmConfig, given: Collection[str] = (), *, server: Server | None) -> None:
    """Raises ConfigError for options that the template needs and lacks, or does not use.

    The names that the template reads decide, so a changed copy is checked too. server: the source of the run's samples.
    """
    reads = reads_of(options)
    for name, value in (("output_dir", config.output_dir), ("working directory", os.getcwd())):
        if "\n" in value or ("mounts" in reads and set(":,") & set(value)):
            why = "has a character in it that the job's script cannot have there"
            raise ConfigError(name, quoted(value), why, "give another folder")
    if "image" in reads and options.image is None:
        raise ConfigError(
            "slurm.image", why=f"is missing, and the template {options.template} needs it", fix="give --image"
        )
    _check_unused(options, reads, given)
    if "server_command" in reads or options.servers.nodes:
        _check_servers(server, options)


def _check_unused(options: SlurmConfig, reads: Collection[str], given: Collection[str]) -> None:
    for name in ("image", "mounts"):
        if getattr(options, name) and name not in reads:
            raise ConfigError(
                f"slurm.{name}",
                getattr(options, name),
                f"is not used by the template {options.template}",
                "give --template container or apptainer",
            )
    if "server_command" in reads:
        return
    for name, value in vars(options.servers).items():
        if f"servers.{name}" in given or (name == "nodes" and value):
            raise ConfigError(
                f"slurm.servers.{name}",
                value,
                f"is not used by the template {options.template}",
                "give --template hetero",
            )


def _check_servers(server: Server | None, options: SlurmConfig) -> None:
    if server is None:
        raise ConfigError(
            "slurm.template",
            options.template,
            "starts inference servers, and this config asks for none",
            "use it for mrl ppo with rollout.backend vllm or sglang",
        )
    if not options.servers.nodes:
        raise ConfigError(
            "slurm.servers.nodes", 0, f"leaves the template {options.template} without a server", "give --servers-nodes"
        )


def _check_devices(asked: set[str], options: SlurmConfig) -> None:
    if "cuda" in asked and not options.gpus_per_node:
        raise ConfigError(
            "slurm.gpus_per_node",
            options.gpus_per_node or 0,
            "gives no GPU to engine.device cuda",
            "give --gpus-per-node",
        )
    if asked == {"cpu"} and options.gpus_per_node:
        raise ConfigError(
            "slurm.gpus_per_node",
            options.gpus_per_node,
            "asks for GPUs that engine.device cpu does not use",
            "give --gpus-per-node 0 and --processes-per-node",
        )


def _check_restarts(config: RowsRunConfig, options: SlurmConfig) -> None:
    if config.checkpoint.resume == "never" and options.max_restarts:
        raise ConfigError(
            "checkpoint.resume",
            "never",
            "refuses what an earlier start of the job has saved, and the job may start again "
            f"{options.max_restarts} times",
            "set it to auto, or give --max-restarts 0",
        )


def _across_nodes(parts: Sequence[Part], layouts: Sequence[ParallelDims], options: SlurmConfig) -> list[str]:
    """Returns warnings for tensor-parallel groups across nodes, because they communicate in every layer."""
    return [
        f"{part.key('engine')}.parallel.tp: groups of {dims.tp} do not fit into the {options.per_node} processes of "
        "a node, so every layer talks over the network; use pp across nodes instead"
        for part, dims in zip(parts, layouts, strict=True)
        if options.nodes > 1 and options.per_node % dims.tp
    ]


def _check_cores(options: SlurmConfig) -> list[str]:
    whole = any(re.match(r"--exclusive\b|--cpus-per-gpu\b", line) for line in options.sbatch)
    if options.launcher == "srun" or options.per_node == 1 or options.cpus_per_task is not None or whole:
        return []
    return [
        f"slurm.cpus_per_task: is not given, and many sites give a task 1 core: all {options.per_node} processes of a "
        f"node would share it; give --cpus-per-task, as in {4 * options.per_node}"
    ]


def _check_time(config: RowsRunConfig, options: SlurmConfig) -> list[str]:
    """Returns what a failed node can lose, and whether there is time to save before the limit."""
    limit_s = seconds_of(options.time) if options.time is not None else None
    step_s, every = step_seconds(pathlib.Path(config.output_dir)), config.checkpoint.every
    found = []
    if step_s is not None and step_s > options.signal_s:
        found.append(
            f"slurm.signal_s: value {options.signal_s} is shorter than a step of this run ({step_s:.0f} s): the signal "
            f"would come too late to save; give at least {2 * step_s:.0f}"
        )
    if every is None:
        found.append(
            "checkpoint.every: is null: a node that fails loses all since the last signal; set it to save in between"
        )
    elif limit_s is not None and step_s is not None and every * step_s > limit_s - options.signal_s:
        found.append(
            f"checkpoint.every: value {every} is {in_words(every * step_s)} at {step_s:.2g} s a step, and the time "
            f"limit is {in_words(limit_s)}: only the signal before it saves; a node that fails loses all"
        )
    return found


def step_seconds(run_dir: pathlib.Path) -> float | None:
    """Returns the median seconds of the newest steps in a run's metrics.jsonl; None without steps."""
    path = run_dir / "metrics.jsonl"
    if not path.exists() or metrics.last_line(path) is None:
        return None
    times = [row["perf/step_s"] for row in metrics.read(path)[-RECENT_STEPS:] if "perf/step_s" in row]
    return statistics.median(times) if times else None


def in_words(seconds: float) -> str:
    """Returns `1 h 05 min`, `3 min 20 s`, `12 s`."""
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {s:02d} s" if minutes else f"{s} s"
