"""Templates of job scripts, the script that one becomes, and the command of an inference server in it.

A template gets the names of `variables_of`. Jinja's StrictUndefined is on: a name that is none of them is an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta

from mrl import __version__
from mrl.config.command import Server
from mrl.errors import ConfigError
from mrl.launch.slurm.options import SAME_NAMES, TEMPLATE_NAMES, SlurmConfig

TEMPLATES = pathlib.Path(__file__).parent / "templates"
SUFFIX = ".sbatch"
TASK_ID = "%a"
"""In an override: the id of an array's task, as in Slurm's own file names."""

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./\[\]-]+")


@dataclasses.dataclass(frozen=True)
class Job:
    """One job, as templates see it. All paths are absolute."""

    command: str  # sft or ppo
    config: str  # the file that the run reads
    overrides: Sequence[str]  # KEY=VALUE after it
    output_dir: str  # of the config
    work_dir: str  # where relative paths of the config begin
    server_command: str = ""  # shell lines that become an inference server

    @property
    def slurm_dir(self) -> str:
        """The folder of scripts, logs and notes of the run's jobs."""
        return os.path.join(self.output_dir, "slurm")


def template_text(name: str) -> str:
    """Returns the text of a template of the package."""
    return (TEMPLATES / (name + SUFFIX)).read_text(encoding="utf-8")


def reads_of(options: SlurmConfig) -> frozenset[str]:
    """Returns names that the job's template reads, and those of the templates it extends except `base`.

    Raises ConfigError where one cannot be read, or has a mistake.
    """
    environment, names = _environment(options), set()
    waiting, seen = [_file_name(options.template)], {"base" + SUFFIX}
    with _errors_of(options):
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                tree = environment.parse(environment.loader.get_source(environment, name)[0], name)
                names |= jinja2.meta.find_undeclared_variables(tree)
                waiting += [found for found in jinja2.meta.find_referenced_templates(tree) if found is not None]
    return frozenset(names)


def render(job: Job, options: SlurmConfig) -> str:
    """Returns the job's script. Raises ConfigError where the template cannot be read, or reads what is not there."""
    with _errors_of(options):
        template = _environment(options).get_template(_file_name(options.template))
        text = template.render(variables_of(job, options))
    return re.sub(r"\n{3,}", "\n\n", text)


def _file_name(template: str) -> str:
    return template + SUFFIX if template in TEMPLATE_NAMES else template


def _environment(options: SlurmConfig) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(
            [jinja2.FunctionLoader(_own_template(options.template)), jinja2.FileSystemLoader(TEMPLATES)]
        ),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"quote": shlex.quote, "comment": _one_line}
    return environment


@contextlib.contextmanager
def _errors_of(options: SlurmConfig) -> Iterator[None]:
    """Raises Jinja's errors as ConfigError."""
    try:
        yield
    except jinja2.TemplateNotFound as error:
        why = f"the template {error.name} does not exist"
        fix = f"give a file, or one of {', '.join(TEMPLATE_NAMES)}"
        raise ConfigError(options.template, why=why, fix=fix) from None
    except jinja2.TemplateError as error:
        at = f" in line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        fix = "correct it there; what a template may read: docs/slurm.md"
        raise ConfigError(options.template, why=f"the template is wrong{at}: {error.message}", fix=fix) from None


def _own_template(path: str) -> Any:
    """Returns a loader of the user's own file, under the very name that was given."""

    def load(name: str) -> tuple[str, str, None] | None:
        file = pathlib.Path(name).expanduser()
        if name != path or path in TEMPLATE_NAMES or not file.is_file():
            return None
        return file.read_text(encoding="utf-8"), str(file), None

    return load


def variables_of(job: Job, options: SlurmConfig) -> dict[str, Any]:
    """Returns what templates may read: the keys of SlurmConfig, and what is derived from them and the job."""
    in_image = options.image is not None  # `check_template` refuses it where the template has no use for it
    mounts = [
        f"{folder}:{folder}" for folder in dict.fromkeys((job.work_dir, job.output_dir, os.path.dirname(job.config)))
    ]
    return vars(options) | {
        "title": _one_line(f"mrl {job.command} {shlex.quote(job.config)}"),
        "version": __version__,
        "run_dir": job.output_dir,
        "slurm_dir": job.slurm_dir,
        "work_dir": job.work_dir,
        "serves": job.command == "serve",
        "server_command": job.server_command,
        "command": _words(job, options),
        "directives": directives(job, options),
        "server_directives": server_directives(options),
        "python": options.python or ("python3" if in_image else sys.executable),
        "per_node": options.per_node,
        "mounts": [*_uncovered(mounts), *options.mounts],
        "srun_options": _srun_options(options),
        "server_srun_options": [*_cpus_per_task(options.servers.cpus_per_task), "--kill-on-bad-exit=1"],
        "probe_options": ["--het-group=0,1"]
        if options.servers.nodes
        else [f"--nodes={options.nodes}", f"--ntasks={options.nodes}", "--ntasks-per-node=1"],
    }


def _uncovered(mounts: Sequence[str]) -> list[str]:
    """Returns mounts without folders inside another one."""
    folders = [mount.partition(":")[0] for mount in mounts]
    inside = lambda a: any(a != b and os.path.commonpath([a, b]) == b for b in folders)  # noqa: E731
    return [mount for mount, folder in zip(mounts, folders, strict=True) if not inside(folder)]


def _words(job: Job, options: SlurmConfig) -> list[str]:
    """Returns the quoted arguments of `mrl`. Each task of an array gets its id, and an output_dir of its own."""
    if options.array is None:
        return [shlex.quote(word) for word in (job.command, job.config, *job.overrides)]
    overrides = [
        *job.overrides,
        f"output_dir={json.dumps(os.path.join(job.output_dir, f'task_{TASK_ID}'), ensure_ascii=False)}",
    ]
    return [shlex.quote(job.command), shlex.quote(job.config), *map(_with_task_id, overrides)]


def _with_task_id(override: str) -> str:
    return '"$SLURM_ARRAY_TASK_ID"'.join(shlex.quote(part) if part else "" for part in override.split(TASK_ID))


def directives(job: Job, options: SlurmConfig) -> list[str]:
    """Returns what follows #SBATCH, a line each, quoted for Slurm."""
    of_task = 1 if options.launcher == "torchrun" else options.per_node
    log = os.path.join(job.slurm_dir.replace("%", "%%"), "%A_%a.log" if options.array is not None else "%j.log")
    values = {
        "job-name": options.job_name or f"mrl-{job.command}-{os.path.basename(job.output_dir)}",
        "chdir": job.work_dir,
        "output": log,
        "open-mode": "append",
        "nodes": options.nodes,
        "ntasks-per-node": of_task,
        **{name: getattr(options, name.replace("-", "_")) for name in SAME_NAMES},
        "signal": f"B:USR1@{options.signal_s}",
    }
    values["gpus-per-node"] = options.gpus_per_node or None
    return [*_lines(values), _requeue(options), *options.sbatch]


def _lines(values: Mapping[str, Any]) -> list[str]:
    return [f"--{name}={sbatch_quote(str(value))}" for name, value in values.items() if value is not None]


def server_directives(options: SlurmConfig) -> list[str]:
    """Returns the #SBATCH lines of the second part of a heterogeneous job; what is null there is the first part's."""
    servers = options.servers
    values = {
        "nodes": servers.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": options.servers_gpus or None,
        "cpus-per-task": servers.cpus_per_task,
        "mem": servers.mem,
        "partition": servers.partition or options.partition,
        **{name: getattr(options, name) for name in ("account", "qos", "time", "constraint", "exclude")},
    }
    return [*_lines(values), _requeue(options)]


def _requeue(options: SlurmConfig) -> str:
    """Returns the option on whether Slurm itself may put the job back, after a failed node or a preemption."""
    return "--requeue" if options.max_restarts else "--no-requeue"


def _srun_options(options: SlurmConfig) -> list[str]:
    """Returns srun's arguments. A failed task ends all, and so does one that ends a minute before the others."""
    tasks = 1 if options.launcher == "torchrun" else options.per_node
    nodes = [f"--nodes={options.nodes}", f"--ntasks={options.nodes * tasks}", f"--ntasks-per-node={tasks}"]
    return [*nodes, *_cpus_per_task(options.cpus_per_task), "--kill-on-bad-exit=1", "--wait=60"]


def _cpus_per_task(count: int | None) -> list[str]:
    """Returns the option, because srun takes it from sbatch no more since Slurm 22.05."""
    return [f"--cpus-per-task={count}"] if count is not None else []


def sbatch_quote(value: str) -> str:
    """Returns a value on an #SBATCH line, as Slurm reads it."""
    if _PLAIN.fullmatch(value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())


def server_command(server: Server, options: SlurmConfig) -> str:
    """Returns shell lines that become one server, on all GPUs of its node."""
    servers = options.servers
    gpus = options.servers_gpus
    model, length = server.model, server.max_length
    if server.kind == "sglang":
        words = ["sglang.launch_server", "--model-path", model.path, "--context-length", str(length)]
        words += ["--enable-deterministic-inference", *(["--tp-size", str(gpus)] if gpus > 1 else [])]
    else:
        log_probs = "raw_logprobs" if server.temperature == 1 else "processed_logprobs"
        words = ["vllm.entrypoints.openai.api_server", "--model", model.path, "--max-model-len", str(length)]
        words += ["--logprobs-mode", log_probs, *(["--tensor-parallel-size", str(gpus)] if gpus > 1 else [])]
    words += ["--dtype", model.dtype, "--host", "0.0.0.0"]
    switch = "export VLLM_SERVER_DEV_MODE=1\n" if server.kind == "vllm" else ""
    start = f'{shlex.join([servers.python, "-m", *words])} --port "$MRL_SERVER_PORT"'
    return f"{switch}exec {' '.join([start, *map(shlex.quote, servers.arguments)])}"
