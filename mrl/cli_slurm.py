"""`mrl slurm`: jobs for Slurm. Every key of a profile's `slurm:` block is an option of the same name."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

import click

from mrl.cli_help import complete_override
from mrl.config.command import all_training
from mrl.config.keys import Key, section_keys
from mrl.errors import ConfigError
from mrl.launch.slurm.options import DEFAULT_PROFILE, SlurmConfig

EXIT_INTERRUPTED = 130


class _Commands(click.Group):
    """Ctrl-C ends the command and no job."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("mrl: interrupted: jobs go on, or end as they were told to before", err=True)
            ctx.exit(EXIT_INTERRUPTED)


@click.group(cls=_Commands)
def slurm() -> None:
    """Render, submit and follow training jobs on a Slurm cluster."""


def _job_options(function: Callable[..., None]) -> Callable[..., None]:
    """The options and arguments of a command that makes a job's script."""
    for key in reversed(list(section_keys(SlurmConfig))):
        keys = section_keys(key.section, key.path) if key.section is not None else [key]
        for one in reversed(list(keys)):
            function = _option(one)(function)
    for decorate in (
        click.option(
            "--profile",
            metavar="FILE",
            help=f"YAML file with site defaults in a `slurm:` block; default {DEFAULT_PROFILE}.",
        ),
        click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1, shell_complete=complete_override),
        click.argument("config_path", metavar="CONFIG", type=click.Path()),
        click.argument("command", type=click.Choice([command.name for command in all_training()])),
    ):
        function = decorate(function)
    return function


def _option(key: Key) -> Callable[..., Any]:
    """`gpus_per_node` -> `--gpus-per-node`; `servers.nodes` -> `--servers-nodes`."""
    name = "--" + key.path.replace("_", "-").replace(".", "-")
    types = typing.get_args(key.annotation) or (key.annotation,)
    several = typing.get_origin(key.annotation) in (tuple, dict)
    choices = typing.get_origin(key.annotation) is typing.Literal
    return click.option(
        name,
        key.path.replace(".", "__"),
        multiple=several,
        metavar="KEY=VALUE" if typing.get_origin(key.annotation) is dict else None,
        type=click.Choice(types) if choices else int if int in types else str,
        default=None,
        help=key.help[0].upper() + key.help[1:] + "." + (" May be given more than once." if several else ""),
    )


def _checked(
    command: str, config_path: str, overrides: tuple[str, ...], profile: str | None, given: dict[str, Any]
) -> Any:
    """The config, checked against the job that the options and the profile describe; warnings are said."""
    from mrl.launch.slurm.profile import load_options
    from mrl.launch.slurm.submit import check

    mappings = {key.path for key in section_keys(SlurmConfig) if typing.get_origin(key.annotation) is dict}
    values: dict[str, Any] = {}
    for name, value in given.items():
        dotted = name.replace("__", ".")
        if value is None or value == ():
            continue
        if dotted in mappings:
            value = _mapping(dotted, value)
        values[dotted] = list(value) if isinstance(value, tuple) else value
    checked = check(command, config_path, overrides, load_options(profile, values), values)
    for warning in checked.warnings:
        click.echo(f"mrl: warning: {warning}", err=True)
    return checked


def _mapping(name: str, pairs: tuple[str, ...]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise ConfigError(f"--{name}: value {pair!r} is no KEY=VALUE; write it as in --{name} NAME=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


@slurm.command()
@_job_options
def render(command: str, config_path: str, overrides: tuple[str, ...], profile: str | None, **given: Any) -> None:
    """Print the script of a job that trains CONFIG, and write nothing."""
    from mrl.launch.slurm.render import render as script_of

    checked = _checked(command, config_path, overrides, profile, given)
    click.echo(script_of(checked.job, checked.options), nl=False)


@slurm.command()
@_job_options
def submit(command: str, config_path: str, overrides: tuple[str, ...], profile: str | None, **given: Any) -> None:
    """Write script and resolved config into output_dir/slurm, and put the job into the queue."""
    from mrl.launch.slurm.submit import submit as put_into_queue

    checked = _checked(command, config_path, overrides, profile, given)
    done, options = put_into_queue(checked), checked.options
    for warning in done.warnings:
        click.echo(f"mrl: warning: {warning}", err=True)
    per_node = f"{options.per_node} {'process' if options.per_node == 1 else 'processes'}"
    if options.servers.nodes:
        per_node += f", and {_nodes(options.servers.nodes)} x 1 server"
    array = f", tasks {options.array} each" if options.array is not None else ""
    click.echo(
        f"submitted job {done.job_id}{array}: {_nodes(options.nodes)} x {per_node}\n"
        f"script: {done.script}\nconfig: {done.config}\nlog:    {done.log}"
    )


def _nodes(count: int) -> str:
    return f"{count} {'node' if count == 1 else 'nodes'}"


@slurm.command()
@click.argument("name", type=click.Choice(["base", "bare", "container", "apptainer", "hetero"]))
def template(name: str) -> None:
    """Print a template, to change and give to --template. All others are blocks in `base`."""
    from mrl.launch.slurm.render import template_text

    click.echo(template_text(name), nl=False)


_TARGET = click.argument("target", metavar="[RUN_DIR|JOBID]", required=False)


@slurm.command()
@_TARGET
def status(target: str | None) -> None:
    """State, time, restarts and progress of a job; without an argument of all your jobs in the queue."""
    from mrl.launch.slurm import follow, jobs

    found = jobs.targets(target)
    if not found:
        click.echo("no job of yours that `mrl slurm submit` has submitted is in the queue")
    for one in found:
        for line in follow.status(one):
            click.echo(line)


@slurm.command()
@_TARGET
@click.option("-f", "--follow", is_flag=True, help="Go on with what is added, until the job has ended.")
@click.option("-n", "--lines", type=click.IntRange(min=0), default=50, show_default=True, help="Lines from the end.")
def logs(target: str | None, follow: bool, lines: int) -> None:
    """The log of a job; where a rank has failed, the error of the first one before all else."""
    from mrl.launch.slurm import follow as following

    for text in following.logs(_one(target), lines=lines, follow=follow):
        click.echo(text, nl=False)


@slurm.command()
@_TARGET
@click.option("--save", is_flag=True, help="Let the run save a checkpoint first.")
@click.option("--timeout", "timeout_s", type=click.IntRange(min=1), default=600, show_default=True, help="Seconds that --save waits.")  # fmt: skip
def cancel(target: str | None, save: bool, timeout_s: int) -> None:
    """End a job. With --save it saves a checkpoint first, and the same submit goes on from there."""
    from mrl.launch.slurm import follow

    follow.cancel(_one(target), save=save, timeout_s=timeout_s, say=click.echo)


def _one(what: str | None) -> Any:
    from mrl.launch.slurm import jobs

    found = jobs.targets(what)
    if len(found) != 1:
        ids = ", ".join(target.job_id for target in found)
        there = f"there are several ({ids})" if found else "you have none in the queue"
        raise ConfigError(f"JOBID: is missing, and {there}; give the id of a job, or the output_dir of its run")
    return found[0]
