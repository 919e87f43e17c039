"""From a profile and a config to a script, and from a script to a job in the queue."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mrl.config import command as commands
from mrl.config.build import build_section
from mrl.config.command import Config
from mrl.config.load import dump_config, load_config, read_yaml
from mrl.config.urls import write_text
from mrl.errors import ConfigError, quoted, unwritable
from mrl.launch.slurm import jobs
from mrl.launch.slurm.checks import check_job, check_template
from mrl.launch.slurm.options import DEFAULT_PROFILE, Profile, SlurmConfig, check_options
from mrl.launch.slurm.render import TASK_ID, Job, render, server_command


def load_options(profile: str | None, given: Mapping[str, Any]) -> SlurmConfig:
    """Returns the profile's `slurm:` block with `given` (keys of SlurmConfig, dotted below servers) over it, checked.

    profile: None is DEFAULT_PROFILE, which need not exist. Lists and mappings are added to the profile's.
    """
    path = pathlib.Path(profile or DEFAULT_PROFILE).expanduser()
    raw = read_yaml(path) if profile is not None or path.is_file() else {}
    block = dict(raw.get("slurm") or {}) if isinstance(raw.get("slurm") or {}, Mapping) else raw["slurm"]
    if isinstance(block, dict):
        for name, value in given.items():
            _put(block, name, value)
        raw = {**raw, "slurm": block}
    options = build_section(Profile, raw, "", Profile).slurm
    check_options(options)
    return options


def _put(block: dict[str, Any], name: str, value: Any) -> None:
    section, dot, last = name.partition(".")
    if dot:
        below = block[section] = dict(block.get(section) or {})
        _put(below, last, value)
    elif isinstance(value, list) and isinstance(block.get(name), list):
        block[name] = [*block[name], *value]
    elif isinstance(value, dict) and isinstance(block.get(name), dict):
        block[name] = {**block[name], **value}
    else:
        block[name] = value


@dataclasses.dataclass(frozen=True)
class CheckedConfig:
    """A config that can run in its job."""

    config: Config
    job: Job  # refers to the user's own file
    options: SlurmConfig
    warnings: Sequence[str]  # of what may go wrong


@dataclasses.dataclass(frozen=True)
class SubmittedJob:
    """A job in the queue, and its files."""

    job_id: str
    script: pathlib.Path
    config: pathlib.Path
    log: str  # with Slurm's %j, %A and %a where Slurm has not put them in


def check(
    command: str,
    config_path: str,
    overrides: Sequence[str],
    options: SlurmConfig,
    given: Collection[str] = (),
    *,
    there: bool = True,
) -> CheckedConfig:
    """Loads the config and checks it against the job. Nothing is written.

    - there: weights and rows must exist.
    - given: keys of SlurmConfig that this job was given. Those of the profile may be for other templates.
    """
    record = commands.record(command)
    config = load_config(config_path, _for_first(overrides, options.array), record.root)
    server = record.server(config)
    check_template(config, options, given, server=server)
    if options.servers.nodes:
        # as many as there will be; their names are known when the job starts
        urls = [f"http://server{i}:{options.servers.port or 8000}" for i in range(options.servers.nodes)]
        added = f"{server.urls}=[{','.join(urls)}]"
        config = load_config(config_path, [*_for_first(overrides, options.array), added], record.root)
    warnings = check_job(record, config, options, there=there)
    output_dir = os.path.abspath(config.output_dir)
    servers = server_command(server, options) if options.servers.nodes else ""
    job = Job(command, os.path.abspath(config_path), tuple(overrides), output_dir, os.getcwd(), servers)
    return CheckedConfig(config, job, options, warnings)


def _for_first(overrides: Sequence[str], array: str | None) -> list[str]:
    if array is None:
        return list(overrides)
    first = re.match(r"\d+", array)
    if any(override.startswith("output_dir=") and TASK_ID in override for override in overrides):
        why = f"value with {TASK_ID} is not needed: each task of an array trains in output_dir/task_ID"
        raise ConfigError("output_dir", why=why, fix=f"leave {TASK_ID} out")
    if first is None:
        raise ConfigError("slurm.array", array, "is no list of task ids", "give one as 0-3 or 1,4,9")
    return [override.replace(TASK_ID, first[0]) for override in overrides]


def submit(checked: CheckedConfig) -> SubmittedJob:
    """Writes script and resolved config into output_dir/slurm and gives the script to sbatch.

    If sbatch refuses, no file stays, and its own message is the error.
    """
    slurm_dir = pathlib.Path(checked.job.slurm_dir)
    _refuse_second(checked, slurm_dir)
    name = _free_name(slurm_dir)
    script, config = slurm_dir / f"{name}.sbatch", slurm_dir / f"{name}.yaml"
    kept = [o for o in checked.job.overrides if checked.options.array is not None and TASK_ID in o]
    text = render(dataclasses.replace(checked.job, config=str(config), overrides=tuple(kept)), checked.options)
    made = [folder for folder in (slurm_dir, *slurm_dir.parents) if not folder.exists()]
    try:
        slurm_dir.mkdir(parents=True, exist_ok=True)
        write_text(script, text)
        write_text(config, _resolved(checked))
    except OSError as error:
        raise unwritable(checked.config.output_dir, slurm_dir, error) from None
    try:
        job_id = jobs.call("sbatch", "--parsable", str(script)).strip().splitlines()[-1].partition(";")[0]
    except ConfigError:
        for path in (script, config):
            path.unlink()
        for folder in made:
            folder.rmdir()
        raise
    log = str(slurm_dir / (f"{job_id}_%a.log" if checked.options.array is not None else f"{job_id}.log"))
    options = checked.options
    jobs.add_record(
        slurm_dir,
        {
            "job": job_id,
            "submitted": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": checked.job.command,
            "nodes": options.nodes,
            "processes_per_node": options.per_node,
            "array": options.array,
            "script": script.name,
            "config": config.name,
        },
    )
    return SubmittedJob(job_id, script, config, log)


def _resolved(checked: CheckedConfig) -> str:
    """Returns the config as the job reads it, but for what differs between an array's tasks, and unknown servers."""
    job = checked.job
    shared = [o for o in job.overrides if checked.options.array is None or TASK_ID not in o]
    config = load_config(job.config, shared, commands.record(job.command).root)
    return f"# Resolved from {' '.join(job.config.splitlines())} for the script beside it.\n{dump_config(config)}"


def _free_name(slurm_dir: pathlib.Path) -> str:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    names = (stamp if number == 1 else f"{stamp}-{number}" for number in range(1, 1000))
    return next(name for name in names if not (slurm_dir / f"{name}.sbatch").exists())


def _refuse_second(checked: CheckedConfig, slurm_dir: pathlib.Path) -> None:
    """Raises ConfigError for a second job of one run, because it would fail hours later."""
    ends = re.findall(r"after(?:any|ok|notok):([\d_:]+)", checked.options.dependency or "")
    waited_for = re.findall(r"\d+", " ".join(ends))
    for job in jobs.in_queue(slurm_dir):
        if job.id.partition("_")[0] in waited_for:
            continue
        raise ConfigError(
            "output_dir",
            quoted(checked.config.output_dir),
            f"has job {job.id} in the queue ({job.state})",
            (
                f"cancel it (mrl slurm cancel {job.id}), give --dependency afterany:{job.id} to go on after "
                "it, or another output_dir"
            ),
        )
