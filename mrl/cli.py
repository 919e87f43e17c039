"""The `mrl` command: makes click commands of the records in `mrl.commands`, and imports nothing heavy before one runs.

Exit codes: 0 done; 2 the user's mistake, one line on stderr; 1 a fault of ours, with a traceback; 75 stopped by a
signal after a checkpoint was saved, "run me again"; 130 Ctrl-C.
"""

from __future__ import annotations

import errno
import faulthandler
import io
import json
import os
import re
import sys
import textwrap
import traceback
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import click
from click.shell_completion import CompletionItem

from mrl import __version__
from mrl.commands import (
    EXIT_FAULT,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    EXIT_USER_ERROR,
    TRAINING_ARGUMENTS,
    Argument,
    Command,
    Group,
    Option,
    say,
)
from mrl.config.command import TrainingCommand, all_training, names, record
from mrl.config.keys import Key, walk_keys
from mrl.errors import ConfigError, Stopped, UserError
from mrl.launch.slurm import ending

INTERRUPTED = (
    "interrupted: what was done since the last checkpoint is lost (SIGTERM saves first); the same command goes on"
)
EXAMPLES = """
    mrl sft sft.yaml                     fine-tune
    mrl ppo grpo.yaml                    reinforcement learning: ppo, grpo, ...
    mrl convert import Qwen/Qwen3-0.6B model-mcore
    mrl config ppo rollout               what the keys of a section mean"""


class _LazyCommands(Mapping[str, click.Command]):
    """Name -> command, each made when it is asked for."""

    def __getitem__(self, name: str) -> click.Command:
        try:
            return _made(name, record(name))
        except ConfigError as error:
            return _broken(name, error)

    def __iter__(self) -> Iterator[str]:
        return iter(names())

    def __len__(self) -> int:
        return len(names())


class _Main(click.Group):
    """Turns what a command raises into a message and an exit code."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        try:
            return super().make_context(*args, **extra)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:  # of options before the command
            say(_of_usage(error, "mrl"))
            sys.exit(EXIT_USER_ERROR)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            try:
                return super().invoke(ctx)
            except OSError as error:
                if isinstance(error, PermissionError) and error.filename is not None:
                    why, fix = "may not be read or written by this user", "give it the right"
                    raise UserError(str(error.filename), why=why, fix=fix) from error
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    what = str(error.filename or "the output")
                    raise UserError(what, why=f"cannot be written ({error.strerror})", fix="free some room") from error
                raise
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            line = _of_usage(error, ctx.command_path)
            say(line)
            ending.record(os.environ, EXIT_USER_ERROR, line)
            ctx.exit(EXIT_USER_ERROR)
        except UserError as error:
            for line in str(error).splitlines() if not error.said else ():  # a config may have several mistakes
                say(line)
            ending.record(os.environ, EXIT_USER_ERROR, str(error))
            ctx.exit(EXIT_USER_ERROR)
        except Stopped as stop:
            say(str(stop) or "stopped after saving a checkpoint; run the same command again to go on")
            notice = ending.record(os.environ, EXIT_STOPPED, str(stop))
            # the job's script knows then; srun and torchrun would make a failure of 75, and kill ranks that are leaving
            ctx.exit(0 if notice and "RANK" in os.environ else EXIT_STOPPED)
        except KeyboardInterrupt as interrupt:
            say(str(interrupt) or INTERRUPTED)
            ctx.exit(EXIT_INTERRUPTED)


def _of_usage(error: click.UsageError, path: str) -> str:
    """Returns the line on a mistake of the command line. path: the command, if the error knows none."""
    ctx, line = error.ctx, error.format_message().rstrip(".")
    if isinstance(error, click.NoSuchOption) and ctx is not None and not error.possibilities:
        if isinstance(ctx.command, _Main):
            line += "; options go after the command's name"
        elif any(one.name == "overrides" for one in ctx.command.params):
            line += "; a key of the config is given as KEY=VALUE"
    return f"{line}; see {path if ctx is None else ctx.command_path} --help"


def _broken(name: str, error: ConfigError) -> click.Command:
    """Returns a placeholder for the command of a broken package. The others are listed and run all the same."""

    def run() -> None:
        raise error

    anything: dict[str, Any] = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(name, callback=run, help=f"{error.why}.", context_settings=anything, add_help_option=False)


def _made(name: str, of: TrainingCommand | Command | Group) -> click.Command:
    """Returns the click command of a record."""
    given: dict[str, Any] = {
        "name": name,
        "help": textwrap.dedent(f"    {of.help.strip()}"),
        "short_help": " ".join(re.split(r"[.:]\s", of.help.strip(), maxsplit=1)[0].removesuffix(".").split()),
        "epilog": _epilog(of.examples),
    }
    if isinstance(of, Group):
        return click.Group(commands={below: _made(below, one) for below, one in of.commands.items()}, **given)

    settings: dict[str, Key] = {}  # options that set keys of the config
    if isinstance(of, TrainingCommand):
        keys = {key.path: key for key in walk_keys(of.root)}
        settings = {option: keys[path] for option, path in of.options.items()}

    def run(**words: Any) -> None:
        if isinstance(of, TrainingCommand):
            from mrl.launch.start import start

            overrides = list(words.pop("overrides"))
            for option, key in settings.items():
                value = words.pop(option.strip("-"))
                if value is not None:  # quoted: `::` is an address, and a mapping in YAML
                    overrides.append(f"{key.path}={json.dumps(value) if key.annotation is str else value}")
            code = start(of, overrides=tuple(overrides), **words)
        else:
            code = of.run(**words)
        if code:
            click.get_current_context().exit(code)

    params = list(of.params if isinstance(of, Command) else TRAINING_ARGUMENTS)
    for option, key in settings.items():
        params.append(Option(names=option, metavar=option.strip("-").upper(), help=f"{key.path}: {key.help}."))
    given |= {"params": [_parameter(one) for one in params], "callback": run}
    return click.Command(**given)


def _epilog(examples: str) -> str:
    """Returns examples as the end of a help text."""
    return "\n".join(["\b", "Examples:", *(f"  {line.strip()}" for line in examples.strip().splitlines())])


def _parameter(of: Argument | Option) -> click.Parameter:
    """Returns the click parameter of an argument or option."""
    kind: Any = {"path": click.Path(), "number": click.INT, "fraction": click.FLOAT}.get(of.kind, click.STRING)
    if of.choices is not None:
        kind = click.Choice(of.choices())
    if isinstance(of, Argument):
        metavar = of.metavar() if callable(of.metavar) else of.metavar
        return click.Argument(
            [of.name], type=kind, metavar=metavar, required=of.required, nargs=-1 if of.several else 1,
            shell_complete=_complete_override if of.kind == "overrides" else None,
        )  # fmt: skip
    words = of.names.split()
    into = of.into or words[-1].lstrip("-").replace("-", "_")
    if of.kind == "flag":
        return click.Option([*words, into], is_flag=True, help=of.help)
    if of.minimum is not None:
        range_of = click.IntRange if of.kind == "number" else click.FloatRange
        kind = range_of(min=of.minimum, max=of.maximum)
    return click.Option(
        [*words, into], type=kind, metavar=of.metavar, multiple=of.several, default=of.default,
        show_default=of.default is not None, help=of.help,
    )  # fmt: skip


def _complete_override(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Returns keys of the command's config that begin with what was typed; after `KEY=` the choices of the key."""
    command = record(ctx.params.get("command") or ctx.info_name)
    roots = [command.root] if command.root is not None else [one.root for one in all_training()]
    keys = {key.path: key for root in roots for key in walk_keys(root)}
    path, equals, begun = incomplete.partition("=")
    if not equals:
        return [CompletionItem(f"{name}=", help=key.help) for name, key in keys.items() if name.startswith(path)]
    if path not in keys:
        return []
    return [CompletionItem(f"{path}={value}") for value in _choices(keys[path].annotation) if value.startswith(begun)]


def _choices(annotation: Any) -> list[str]:
    """Returns the values of a key, if there are few."""
    if annotation is bool:
        return ["true", "false"]
    if annotation is type(None):
        return ["null"]
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    if typing.get_origin(annotation) is tuple:
        return []
    return [choice for arm in typing.get_args(annotation) for choice in _choices(arm)]


@click.group(
    cls=_Main,
    commands=_LazyCommands(),
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_epilog(EXAMPLES),
)
@click.version_option(__version__, prog_name="mrl")
def main() -> None:
    """Train language models with Megatron-Core, on one laptop or many GPUs."""


def command() -> None:
    """Runs `mrl` as a process of its own. One that has loaded PyTorch does not end the interpreter's way."""
    if sys.stderr is not None:
        faulthandler.enable()  # a crash in a C++ library then shows the Python lines that called it
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name that an ASCII terminal cannot show is no fault
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        main(prog_name="mrl")
    except BaseException as end:
        is_rank = "RANK" in os.environ  # of another launcher
        if not is_rank and "torch" not in sys.modules:
            raise
        code = EXIT_FAULT
        if isinstance(end, SystemExit):
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        else:
            traceback.print_exception(end)
            last = traceback.format_exception_only(end)[-1]
            ending.record(os.environ, EXIT_FAULT, last, "".join(traceback.format_exception(end)))
        from mrl.launch.worker import leave

        leave(code, failed=is_rank and code not in (0, EXIT_STOPPED))
