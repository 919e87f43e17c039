"""The keys of a profile's `slurm:` block, with which a job asks Slurm, and checks of them against each other.

Every key of `SlurmConfig` is an option of the same name: `gpus_per_node: 8` is `--gpus-per-node 8`.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal

from mrl.config.schema import key
from mrl.errors import ConfigError, show

DEFAULT_PROFILE = "~/.config/mrl/slurm.yaml"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServersConfig:
    """Nodes of their own for inference servers, one server a node, as the second part of a heterogeneous job."""

    nodes: int = key(0, "nodes with an inference server each, beside those that train (template hetero)", minimum=0)
    gpus_per_node: int | None = key(None, "GPUs of each server's node; null is gpus_per_node", minimum=0)
    partition: str | None = key(None, "partition of the servers' nodes; null is partition")
    cpus_per_task: int | None = key(None, "CPU cores of each server; null is Slurm's default", minimum=1)
    mem: str | None = key(None, "memory of each server's node, as in 64G; null is Slurm's default")
    setup: tuple[str, ...] = key((), "shell lines before a server, as `source /opt/vllm/bin/activate`")
    python: str = key("python", "the interpreter that has vLLM or SGLang")
    port: int | None = key(
        None,
        "port that every server listens on; null is one that the job's id gives and that is free",
        minimum=1024,
        maximum=65535,
    )
    arguments: tuple[str, ...] = key((), "more arguments of the server's command line")
    start_timeout_s: int = key(1800, "longest wait until all servers answer", minimum=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    nodes: int = key(1, "nodes that train", minimum=1)
    gpus_per_node: int | None = key(None, "GPUs of each node: one process each; 0 to train on CPUs", minimum=0)
    gpu: str | None = key(
        None, "what GPUs the nodes have, as `mrl plan --gpu` names them: submit refuses a job that does not fit them"
    )
    processes_per_node: int | None = key(None, "processes on each node; null is gpus_per_node", minimum=1)
    cpus_per_task: int | None = key(
        None, "CPU cores of a Slurm task: of a node with launcher torchrun, of a process with srun", minimum=1
    )
    mem: str | None = key(None, "memory of a node, as in 64G; 0 is all of it")
    time: str | None = key(None, 'time limit as Slurm writes it, quoted in YAML: "30" (minutes), "4:00:00", "2-12"')
    partition: str | None = key(None, "partition")
    account: str | None = key(None, "account to charge")
    qos: str | None = key(None, "quality of service")
    constraint: str | None = key(None, "features that nodes must have")
    exclude: str | None = key(None, "nodes not to use")
    nodelist: str | None = key(None, "nodes to use")
    array: str | None = key(
        None, "task ids, as 0-3; %a in KEY=VALUE is the id; each task trains in its own output_dir/task_ID"
    )
    dependency: str | None = key(None, "when to start, as afterok:1234")
    mail_type: str | None = key(None, "events that send mail, as END,FAIL")
    mail_user: str | None = key(None, "who gets the mail")
    job_name: str | None = key(None, "name in the queue; null is made of the command and the name of output_dir")
    sbatch: tuple[str, ...] = key((), "more #SBATCH lines, as --exclusive")
    template: str = key(
        "bare", "name of a template (bare, container, apptainer, hetero), or the path of one of your own"
    )
    launcher: Literal["torchrun", "srun"] = key("torchrun", "one torchrun a node, or one srun task a process")
    rendezvous: Literal["static", "c10d"] = key(
        "static", "how torchrun's nodes meet: ranks in the order of the nodes, or c10d's, which gives them out itself"
    )
    python: str | None = key(
        None,
        "interpreter that has mrl, on the nodes or in the image; null is the one that submits, python3 in an image",
    )
    setup: tuple[str, ...] = key(
        (), "shell lines before the start, as `module load cuda` or `source venv/bin/activate`"
    )
    env: dict[str, str] = key(dict, "environment variables of the training")
    image: str | None = key(None, "container image (templates container and apptainer)")
    mounts: tuple[str, ...] = key(
        (), "folders to mount in the container as OUTSIDE:INSIDE, beside output_dir and the working directory"
    )
    interface: str | None = key(
        None,
        "network interface of NCCL and gloo, as ib0; null: NCCL chooses, gloo takes the one towards the first node",
    )
    signal_s: int = key(
        120,
        "seconds before the time limit at which the run is told to save; above the time of a step and a save",
        minimum=1,
    )
    max_restarts: int = key(
        3, "how often the job is put back into the queue after a time limit, a preemption or a failed node", minimum=0
    )
    variables: dict[str, str] = key(dict, "what a template of your own reads as variables.NAME")
    servers: ServersConfig = key(ServersConfig, "inference servers of `mrl ppo` on nodes of their own")

    @property
    def per_node(self) -> int:
        """Processes on each node; `check_options` has made sure that one of the keys is given."""
        return self.processes_per_node or self.gpus_per_node or 1

    @property
    def servers_gpus(self) -> int:
        """GPUs of each server's node."""
        gpus = self.servers.gpus_per_node
        return gpus if gpus is not None else self.gpus_per_node or 0

    @property
    def world_size(self) -> int:
        return self.nodes * self.per_node


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """A profile's file."""

    slurm: SlurmConfig = key(SlurmConfig, "site defaults of `mrl slurm`")


def check_options(options: SlurmConfig) -> None:
    """Raises ConfigError where options contradict each other, or would break the script they are written into."""
    _check_text(options, "slurm")
    _check_text(options.servers, "slurm.servers")
    if not options.gpus_per_node and options.processes_per_node is None:
        raise ConfigError(
            "slurm.gpus_per_node",
            options.gpus_per_node,
            "says nothing about how many processes a node runs",
            "give --gpus-per-node, or --gpus-per-node 0 and --processes-per-node to train on CPUs",
        )
    if options.rendezvous != "static" and options.launcher != "torchrun":
        raise ConfigError(
            "slurm.rendezvous",
            options.rendezvous,
            f"is torchrun's, and has no effect with launcher {options.launcher}",
            "leave it out, or give --launcher torchrun",
        )
    if options.gpus_per_node and options.per_node > options.gpus_per_node:
        raise ConfigError(
            "slurm.processes_per_node",
            options.per_node,
            f"is above the {options.gpus_per_node} GPUs of a node",
            "leave it out for one process a GPU",
        )
    limit_s = None if options.time is None else seconds_of(options.time)
    if limit_s is not None and limit_s <= options.signal_s:
        why = f"is not longer than the {options.signal_s} s before its end at which the run saves (slurm.signal_s)"
        raise ConfigError("slurm.time", options.time, why, "give more time")
    for name in options.env:
        if not name.isidentifier():
            raise ConfigError("slurm.env", name, "is no name of a variable", "use letters, digits and _")
    for line in options.sbatch:
        if not line.startswith("-"):
            raise ConfigError(
                "slurm.sbatch",
                why=f"the line {show(line)} does not begin with -",
                fix="write it as after #SBATCH, as --exclusive",
            )
        _check_repeated(line)
    for mount in options.mounts:
        if not re.fullmatch(r"/[^:,]*:/[^:,]*(:[a-z+,]+)?", mount):
            raise ConfigError("slurm.mounts", mount, "is no mount", "give absolute paths as /data:/data")


TEMPLATE_NAMES = ("bare", "container", "apptainer", "hetero")
"""Names of the job templates that mrl has."""

SAME_NAMES = tuple("""
    nodes gpus-per-node cpus-per-task mem time partition account qos constraint exclude nodelist array
    dependency mail-type mail-user
""".split())  # fmt: skip  # noqa: SIM905
"""Slurm's options that keys of `SlurmConfig` are called after."""

OURS = (*SAME_NAMES, "job-name", "ntasks-per-node", "signal", "requeue", "no-requeue", "chdir", "output", "open-mode")
"""Slurm's options of lines that mrl writes."""


def _check_repeated(line: str) -> None:
    """Raises ConfigError for a short option, and for one that mrl writes: Slurm would take the later one."""
    for option in re.findall(r"(?:^|\s)(--[\w-]+|-\w)", line):
        if not option.startswith("--"):
            why = f"{option} of the line {show(line)} is a short option"
            raise ConfigError("slurm.sbatch", why=why, fix="write its long name")
        if option.removeprefix("--") in OURS:
            why = f"{option} of the line {show(line)} is an option that mrl writes"
            raise ConfigError("slurm.sbatch", why=why, fix="give the option of mrl slurm for it")


def _check_text(section: Any, path: str) -> None:
    """Refuses line breaks: they would end an #SBATCH line. Refuses empty values: they mean nothing to Slurm."""
    for name, value in vars(section).items():
        several = value if isinstance(value, tuple) else value.values() if isinstance(value, dict) else (value,)
        for text in several:
            empty = isinstance(text, str) and not text.strip() and not isinstance(value, dict)
            if isinstance(text, str) and ("\n" in text or "\0" in text or empty):
                what = "is empty" if empty else "has a line break or NUL"
                raise ConfigError(f"{path}.{name}", text, what, "give one line of text, or leave it out")


_TIME = re.compile(
    r"(?:(?P<d>\d+)-(?P<dh>\d+)(?::(?P<dm>\d+)(?::(?P<ds>\d+))?)?|(?P<a>\d+)(?::(?P<b>\d+)(?::(?P<c>\d+))?)?)"
)


def seconds_of(time: str) -> int | None:
    """Returns Slurm's time limit in seconds; None for no limit, as 0 is. ConfigError: it is none of Slurm's forms."""
    if time.upper() in ("UNLIMITED", "INFINITE"):
        return None
    match = _TIME.fullmatch(time)
    if match is None:
        raise ConfigError(
            "slurm.time", time, "is no time limit", 'give minutes, "H:MM:SS", "D-H" or "D-HH:MM:SS", as in "4:00:00"'
        )
    part = {name: int(text or 0) for name, text in match.groupdict().items()}
    if match["d"] is not None:
        return ((part["d"] * 24 + part["dh"]) * 60 + part["dm"]) * 60 + part["ds"] or None
    if match["c"] is not None:
        return (part["a"] * 60 + part["b"]) * 60 + part["c"] or None
    return part["a"] * 60 + part["b"] or None
