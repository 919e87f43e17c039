"""`mrl slurm`: jobs for Slurm. Every key of a profile's `slurm:` block is an option of the same name."""

from __future__ import annotations

import contextlib
import typing
from collections.abc import Iterator
from typing import Any

from mrl.commands import CONFIG, OVERRIDES, Argument, Command, Group, Option, echo, say
from mrl.config.command import roots
from mrl.config.keys import Key, section_keys
from mrl.errors import ConfigError, quoted
from mrl.launch.slurm.options import DEFAULT_PROFILE, TEMPLATE_NAMES, SlurmConfig
from mrl.words import pluralize


@contextlib.contextmanager
def _jobs_go_on() -> Iterator[None]:
    """Says on Ctrl-C that it ends the command and no job."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted: jobs go on, or end as they were told to before") from None


def _job_params() -> Iterator[Argument | Option]:
    """Yields the arguments and options of a command that makes a job's script."""
    yield Argument(name="command", choices=lambda: list(roots()))
    yield CONFIG
    yield OVERRIDES
    yield Option(
        names="--profile", metavar="FILE",
        help=f"YAML file with site defaults in a `slurm:` block; default {DEFAULT_PROFILE}.",
    )  # fmt: skip
    for key in section_keys(SlurmConfig):
        keys = section_keys(key.section, key.path) if key.section is not None else [key]
        yield from map(_option, keys)


def _option(key: Key) -> Option:
    """Returns the option of a key: `--gpus-per-node` of `gpus_per_node`, `--servers-nodes` of `servers.nodes`."""
    types = typing.get_args(key.annotation) or (key.annotation,)
    several = typing.get_origin(key.annotation) in (tuple, dict)
    return Option(
        names="--" + key.path.replace("_", "-").replace(".", "-"),
        into=key.path.replace(".", "__"),
        several=several,
        metavar="KEY=VALUE" if typing.get_origin(key.annotation) is dict else None,
        choices=(lambda: types) if typing.get_origin(key.annotation) is typing.Literal else None,
        kind="number" if int in types else "text",
        help=key.help[0].upper() + key.help[1:] + "." + (" May be given more than once." if several else ""),
    )


def _checked(
    command: str, config_path: str, overrides: tuple[str, ...], profile: str | None, *, there: bool = True, **given: Any
) -> Any:
    """Returns the config, checked against the job that the options and the profile describe; warnings are said."""
    from mrl.launch.slurm.submit import check, load_options

    mappings = {key.path for key in section_keys(SlurmConfig) if typing.get_origin(key.annotation) is dict}
    values: dict[str, Any] = {}
    for name, value in given.items():
        dotted = name.replace("__", ".")
        if value is None or value == ():
            continue
        if dotted in mappings:
            value = _mapping(dotted, value)
        values[dotted] = list(value) if isinstance(value, tuple) else value
    checked = check(command, config_path, overrides, load_options(profile, values), values, there=there)
    for warning in checked.warnings:
        say(f"warning: {warning}")
    return checked


def _mapping(name: str, pairs: tuple[str, ...]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise ConfigError(f"--{name}", quoted(pair), "is no KEY=VALUE", f"write it as in --{name} NAME=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


def render(**given: Any) -> None:
    from mrl.launch.slurm.render import render as script_of

    checked = _checked(**given, there=False)
    echo(script_of(checked.job, checked.options), end="")


def submit(command: str, force: bool, **given: Any) -> None:
    from mrl.launch.slurm.submit import submit as put_into_queue

    checked = _checked(command, **given)
    if not force:
        _refuse_what_does_not_fit(command, checked)
    done, options = put_into_queue(checked), checked.options
    per_node = pluralize(options.per_node, "process", "processes")
    if options.servers.nodes:
        per_node += f", and {pluralize(options.servers.nodes, 'node')} x 1 server"
    array = f", tasks {options.array} each" if options.array is not None else ""
    echo(
        f"submitted job {done.job_id}{array}: {pluralize(options.nodes, 'node')} x {per_node}\n"
        f"script: {done.script}\nconfig: {done.config}\nlog:    {done.log}"
    )


def _refuse_what_does_not_fit(command: str, checked: Any) -> None:
    """Raises ConfigError for a job whose plan takes more than its GPUs have."""
    options = checked.options
    if options.gpu is None:
        if options.gpus_per_node:
            say("not planned: give --gpu NAME")
        return
    from mrl.config.command import record
    from mrl.launch.planning import verdict
    from mrl.plan.gpus import gpu_of

    card = gpu_of(options.gpu, "slurm.gpu")
    fits, line = verdict(record(command), checked.config, options.world_size, card)
    say(f"plan: {line}")
    if fits is False:
        fix = "give more nodes, other degrees (mrl plan --suggest), or --force to submit it all the same"
        raise ConfigError("slurm.gpu", options.gpu, "has too little memory for this job", fix)


def template(name: str) -> None:
    from mrl.launch.slurm.render import template_text

    echo(template_text(name), end="")


@_jobs_go_on()
def status(target: str | None) -> None:
    from mrl.launch.slurm import follow, jobs

    targets = jobs.targets(target)
    if not targets:
        echo("no job of yours that `mrl slurm submit` has submitted is in the queue")
    for one in targets:
        for line in follow.status(one):
            echo(line)


@_jobs_go_on()
def logs(target: str | None, follow: bool, lines: int) -> None:
    from mrl.launch.slurm import follow as following

    for text in following.logs(_one(target), lines=lines, follow=follow):
        echo(text, end="")


@_jobs_go_on()
def cancel(target: str | None, save: bool, timeout_s: int) -> None:
    from mrl.launch.slurm import follow

    follow.cancel(_one(target), save=save, timeout_s=timeout_s, say=echo)


def _one(what: str | None) -> Any:
    from mrl.launch.slurm import jobs

    targets = jobs.targets(what)
    if len(targets) != 1:
        ids = ", ".join(target.job_id for target in targets)
        there = f"there are several ({ids})" if targets else "you have none in the queue"
        raise ConfigError(
            "JOBID", why=f"is missing, and {there}", fix="give the id of a job, or the output_dir of its run"
        )
    return targets[0]


_TARGET = Argument(name="target", metavar="[RUN_DIR|JOBID]", required=False)

COMMAND = Group(
    help="Render, submit and follow training jobs on a Slurm cluster.",
    examples="""
        mrl slurm submit sft sft.yaml --nodes 2 --gpus-per-node 8
        mrl slurm status runs/demo
        mrl slurm logs runs/demo -f""",
    commands={
        "render": Command(
            help="Print the script of a job that trains CONFIG, and write nothing.",
            examples="mrl slurm render sft sft.yaml --nodes 2 --gpus-per-node 8",
            run=render,
            params=tuple(_job_params()),
        ),
        "submit": Command(
            help="Write script and resolved config into output_dir/slurm, and put the job into the queue.",
            examples="""
                mrl slurm submit sft sft.yaml --nodes 2 --gpus-per-node 8
                mrl slurm submit ppo grpo.yaml train.steps=500 --profile site.yaml""",
            run=submit,
            params=(
                *_job_params(),
                Option(names="--force", kind="flag", help="Submit a job that does not fit its GPUs (--gpu), too."),
            ),
        ),
        "template": Command(
            help="Print a template, to change and give to --template. All others are blocks in `base`.",
            examples="mrl slurm template bare > job.sbatch",
            run=template,
            params=[Argument(name="name", choices=lambda: ["base", *TEMPLATE_NAMES])],
        ),
        "status": Command(
            help="State, time, restarts and progress of a job; without an argument of all your jobs in the queue.",
            examples="""
                mrl slurm status
                mrl slurm status runs/demo""",
            run=status,
            params=[_TARGET],
        ),
        "logs": Command(
            help="The log of a job; where a rank has failed, the error of the first one before all else.",
            examples="""
                mrl slurm logs runs/demo -f
                mrl slurm logs 12345 -n 200""",
            run=logs,
            params=[
                _TARGET,
                Option(names="-f --follow", kind="flag", help="Go on with what is added, until the job has ended."),
                Option(names="-n --lines", kind="number", minimum=0, default=50, help="Lines from the end."),
            ],
        ),
        "cancel": Command(
            help="End a job. With --save it saves a checkpoint first, and the same submit goes on from there.",
            examples="mrl slurm cancel runs/demo --save",
            run=cancel,
            params=[
                _TARGET,
                Option(names="--save", kind="flag", help="Let the run save a checkpoint first."),
                Option(
                    names="--timeout", into="timeout_s", kind="number", minimum=1, default=600,
                    help="Seconds that --save waits.",
                ),
            ],
        ),
    },
)  # fmt: skip
