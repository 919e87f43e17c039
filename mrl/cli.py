"""The `mrl` command. Nothing heavy is imported before a command runs.

Exit codes: 0 done; 2 the user's mistake, one line on stderr; 1 a fault of ours, with a traceback; 75 stopped by a
signal after a checkpoint was saved, "run me again"; 130 Ctrl-C.
"""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from typing import TYPE_CHECKING, Any

import click

from mrl import __version__
from mrl.errors import Stopped, UserError

if TYPE_CHECKING:
    from mrl.config.schema import SFTConfig
    from mrl.parallel import ParallelDims

EXIT_USER_ERROR, EXIT_FAULT, EXIT_STOPPED, EXIT_INTERRUPTED = 2, 1, 75, 130

INTERRUPTED = (
    "interrupted: what was done since the last checkpoint is lost (SIGTERM saves first); the same command goes on"
)

_SFT = "mrl.trainers.sft:run"


class _Commands(click.Group):
    """Turns what a command raises into a message and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            _say(str(error))
            ctx.exit(EXIT_USER_ERROR)
        except Stopped as stop:
            _say(str(stop) or "stopped after saving a checkpoint; run the same command again to go on")
            ctx.exit(EXIT_STOPPED)
        except KeyboardInterrupt:
            _say(INTERRUPTED)
            ctx.exit(EXIT_INTERRUPTED)


def _say(message: str) -> None:
    """One line on stderr. Ranks that torchrun or srun started each say theirs, those above 0 with their number.

    What one finds before they have met, the others may not: a file that is missing on one node is on that node's line alone.
    """
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    prefix = "mrl: " if rank == "0" else f"mrl: rank {rank}: "
    click.echo(prefix + " ".join(message.split()), err=True)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mrl")
def main() -> None:
    """Train language models with Megatron-Core, on one laptop or many GPUs."""


def command() -> None:
    """`mrl` as a process of its own; one that another launcher started as a rank does not end the interpreter's way."""
    try:
        main(prog_name="mrl")
    except BaseException as end:
        if "RANK" not in os.environ:
            raise
        code = EXIT_FAULT
        if isinstance(end, SystemExit):
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        else:
            traceback.print_exception(end)
        from mrl.launch.worker import leave

        leave(code, failed=code not in (0, EXIT_STOPPED))


@main.command()
@click.argument("config_path", metavar="CONFIG", type=click.Path())
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@click.option("--nproc", type=click.IntRange(min=1), help="Processes to start; default: the GPUs, else what the layout needs.")  # fmt: skip
@click.option(
    "--dry-run",
    is_flag=True,
    help="Check keys, files, layout, and the model's config.json, print what would run, write nothing. "
    "Weights, tokenizer, rows and checkpoints are read by the run alone.",
)
def sft(config_path: str, overrides: tuple[str, ...], nproc: int | None, dry_run: bool) -> None:
    """Fine-tune a model on the rows that the YAML file CONFIG names.

    KEY=VALUE sets any config key, as in train.steps=10; `mrl config` lists them.
    """
    from mrl.config.load import load_config
    from mrl.launch import preflight
    from mrl.launch.environment import joined_world
    from mrl.launch.worker import log_path, warnings_in

    joined = joined_world(os.environ)
    config = load_config(config_path, overrides)
    if config.engine.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # megatron computes on a GPU wherever it sees one
    model = preflight.check_files(config)
    if joined is None:
        nproc = _choose_nproc(config, nproc)
    elif nproc is not None:
        raise UserError(f"--nproc: value {nproc} has no effect under {joined.launcher}; leave it out")
    world_size = nproc if joined is None else joined.world_size
    dims = preflight.check_layout(config, model, world_size)
    if dry_run:
        _describe(config, dims)
        return
    command_line = shlex.join(["mrl", *sys.argv[1:]])
    if joined is not None:
        os.environ.update(joined.variables)
        with warnings_in(log_path(os.path.join(config.output_dir, "logs"), joined.rank)):
            _target()(config, command_line)
    else:
        _start(config, command_line, nproc)


def _choose_nproc(config: SFTConfig, asked: int | None) -> int:
    from mrl.config.checks import smallest_world
    from mrl.launch.preflight import choose_nproc

    gpus = 0
    if config.engine.device != "cpu":
        import torch

        gpus = torch.cuda.device_count()
    needed = smallest_world(config.engine.parallel)
    return choose_nproc(asked, device=config.engine.device, gpus=gpus, needed=needed)


def _start(config: SFTConfig, command_line: str, nproc: int) -> None:
    """Runs the trainer in `nproc` processes on this machine: in this one where one suffices."""
    from mrl.launch import local

    try:
        if nproc == 1:
            local.run_here(
                lambda *given: _target()(*given), config, command_line
            )  # warnings of its imports go to the log
        else:
            local.launch(_SFT, config, command_line, nproc)
    except local.RankFailed as failure:
        click.echo(f"mrl: {failure}", err=True)
        click.get_current_context().exit(EXIT_FAULT)


def _target() -> Any:
    from mrl.trainers.sft import run

    return run


def _describe(config: SFTConfig, dims: ParallelDims) -> None:
    """Prints the resolved config, which is YAML, and comments on what it means on these processes."""
    from mrl.config.checks import resolve_engine_tokens
    from mrl.config.load import dump_config

    tokens, train = resolve_engine_tokens(config), config.train
    cut = f"{config.engine.micro_batch.size} sequences" if tokens is None else f"up to {tokens} tokens"
    length = f"{train.steps} steps" if train.steps is not None else f"{train.resolved_epochs:g} epochs"
    click.echo(dump_config(config), nl=False)
    click.echo(f"# layout: {dims.describe()} on {dims.world_size} {'process' if dims.world_size == 1 else 'processes'}")
    click.echo(f"# micro-batch: {cut}")
    click.echo(f"# length: {length} of {train.global_batch_size} sequences a step")


@main.command("config")
@click.argument("command", type=click.Choice(["sft"]), default="sft")
def show_config(command: str) -> None:
    """Print every config key: type, default, meaning."""
    from mrl.config.docs import text

    click.echo(text(), nl=False)
