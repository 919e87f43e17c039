"""The `mrl` command. Nothing heavy is imported before a command runs.

Exit codes: 0 done; 2 the user's mistake, one line on stderr; 1 a fault of ours, with a traceback; 75 stopped by a
signal after a checkpoint was saved, "run me again"; 130 Ctrl-C.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import itertools
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from mrl import __version__
from mrl.cli_help import add_examples, complete_override, meant_by
from mrl.cli_slurm import slurm
from mrl.config.command import Config, Part, TrainingCommand, all_training
from mrl.errors import Stopped, UserError
from mrl.launch.slurm import ending

if TYPE_CHECKING:
    from mrl.convert.verifying import Comparison

EXIT_USER_ERROR, EXIT_FAULT, EXIT_STOPPED, EXIT_INTERRUPTED = 2, 1, 75, 130

LOADING = "loading PyTorch and what goes with it"
INTERRUPTED = (
    "interrupted: what was done since the last checkpoint is lost (SIGTERM saves first); the same command goes on"
)


class _Commands(click.Group):
    """Turns what a command raises into a message and an exit code."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Names what another trainer's command is here."""
        if self.get_command(ctx, args[0]) is None and self.name == "main" and (advice := meant_by(args[0])):
            raise UserError(advice)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            _say(str(error))
            ending.record(os.environ, EXIT_USER_ERROR, str(error))
            ctx.exit(EXIT_USER_ERROR)
        except Stopped as stop:
            _say(str(stop) or "stopped after saving a checkpoint; run the same command again to go on")
            told = ending.record(os.environ, EXIT_STOPPED, str(stop))
            # the job's script knows then; srun and torchrun would make a failure of 75, and kill ranks that are leaving
            ctx.exit(0 if told and "RANK" in os.environ else EXIT_STOPPED)
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
            last = traceback.format_exception_only(end)[-1]
            ending.record(os.environ, EXIT_FAULT, last, "".join(traceback.format_exception(end)))
        from mrl.launch.worker import leave

        leave(code, failed=code not in (0, EXIT_STOPPED))


def _takes_config(function: Callable[..., None]) -> Callable[..., None]:
    """The arguments and options of a command that trains."""
    for decorate in (
        click.option(
            "--dry-run",
            is_flag=True,
            help="Check keys, files, layouts, and each model's config.json, print what would run, write nothing. "
            "Weights, tokenizer, rows and checkpoints are read by the run alone.",
        ),
        click.option("--nproc", type=click.IntRange(min=1), help="Processes to start; default: the GPUs, else what the layouts need."),
        click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1, shell_complete=complete_override),
        click.argument("config_path", metavar="CONFIG", type=click.Path()),
    ):  # fmt: skip
        function = decorate(function)
    return function


def _add(command: TrainingCommand) -> None:
    """Makes the command of a record."""

    def run(**arguments: Any) -> None:
        _train(command, **arguments)

    main.add_command(click.command(command.name, help=command.help)(_takes_config(run)))


for _command in all_training():
    _add(_command)


def _train(
    command: TrainingCommand, *, config_path: str, overrides: tuple[str, ...], nproc: int | None, dry_run: bool
) -> None:
    """Checks what can be checked before any process starts, and runs the command's trainer."""
    from mrl.config.load import load_config
    from mrl.launch import preflight
    from mrl.launch.describe import describe
    from mrl.launch.environment import interface_towards, joined_world
    from mrl.launch.worker import log_path, warnings_in
    from mrl.trainers.waits import said

    joined = joined_world(os.environ)
    config = load_config(config_path, overrides, command.root)
    if "cpu" in preflight.devices(command, config):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # megatron computes on a GPU wherever it sees one
    shows = not dry_run and config.log.console != "none" and (joined is None or joined.rank == 0)
    with said("checking files and layout", shows=shows):
        parts = preflight.check_files(command, config)
        if joined is None:
            nproc = _choose_nproc(parts, nproc)
        elif nproc is not None:
            raise UserError(f"--nproc: value {nproc} has no effect under {joined.launcher}; leave it out")
        layouts = preflight.check_layout(command, config, parts, nproc if joined is None else joined.world_size)
    if dry_run:
        preflight.check_code(command, config)
        for line in describe(command, config, parts, layouts):
            click.echo(line)
        return
    command_line = shlex.join(["mrl", *sys.argv[1:]])
    if joined is not None:
        os.environ.update(joined.variables)
        if (
            "GLOO_SOCKET_IFNAME" not in os.environ
            and (name := interface_towards(os.environ["MASTER_ADDR"])) is not None
        ):
            os.environ["GLOO_SOCKET_IFNAME"] = name
        with warnings_in(log_path(os.path.join(config.output_dir, "logs"), joined.rank)):
            with said(LOADING, shows=shows):
                run = _target(command)
            run(config, command_line)
    else:
        _start(command, config, command_line, nproc, shows)


def _choose_nproc(parts: Sequence[Part], asked: int | None) -> int:
    from mrl.launch.preflight import choose_nproc, needed_processes

    gpus = 0
    devices = {part.key("engine"): part.engine.device for part in parts}
    if "cpu" not in devices.values():
        import torch

        gpus = torch.cuda.device_count()
    key = next((key for key, device in devices.items() if device == "cuda"), "engine")
    device = devices.get(key, "auto")
    return choose_nproc(asked, device=device, gpus=gpus, needed=needed_processes(parts), key=key)


def _start(command: TrainingCommand, config: Config, command_line: str, nproc: int, shows: bool) -> None:
    """Runs the trainer in `nproc` processes on this machine: in this one where one suffices."""
    from mrl.trainers.waits import said

    with said(LOADING, shows=shows):
        from mrl.launch import local

    def run(*given: Any) -> None:
        with said(LOADING, shows=shows):  # here, where warnings of its imports go to the log
            trainer = _target(command)
        trainer(*given)

    try:
        if nproc == 1:
            local.run_here(run, config, command_line)
        else:
            local.launch(command.trainer, config, command_line, nproc)
    except local.RankFailed as failure:
        click.echo(f"mrl: {failure}", err=True)
        click.get_current_context().exit(EXIT_FAULT)


def _target(command: TrainingCommand) -> Callable[[Any, str], None]:
    """The function that trains."""
    module, _, function = command.trainer.partition(":")
    return getattr(importlib.import_module(module), function)


main.add_command(slurm)


@main.command("config")
@click.argument("names", metavar="[sft|ppo] [SECTION]", nargs=-1)
@click.option("--grep", "wanted", metavar="TEXT", help="Only keys whose name or meaning has TEXT.")
def show_config(names: tuple[str, ...], wanted: str | None) -> None:
    """Print config keys: type, default, meaning. Without arguments every one of `mrl sft`.

    SECTION is a dotted name, as in rollout or engine.parallel, or that of a key; it is looked for in the commands that have it.
    """
    from mrl.config.docs import asked

    click.echo(asked(names, wanted), nl=False)


class _Conversions(_Commands):
    """Commands on files: what the file system refuses is a message, too."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OSError as error:
            if error.errno == errno.EPIPE or error.filename is None:
                raise
            _say(f"{str(error.filename)[:200]}: {error.strerror}; give another path, or put it right")
            ctx.exit(EXIT_USER_ERROR)


class _Text(click.ParamType):
    """Text or a path that can be printed and given to a tokenizer: bytes that are no UTF-8 cannot."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise UserError(f"{param.opts[0]}: value {value!r} is not UTF-8; give another, or rename it") from None
        return value


@main.group(cls=_Conversions)
def convert() -> None:
    """Convert weights between Hugging Face folders and mcore checkpoints, and compare them. No GPU is needed."""
    gc.set_threshold(
        100_000
    )  # importing torch and transformers leaves no garbage, and a fifth of it is looking for some


_VERIFY = click.option(
    "--verify", "check", is_flag=True, help="Compare the result with the source at once, as `mrl convert verify` does."
)
_NO_LOGITS = click.option(
    "--no-logits", is_flag=True, help="With --verify: compare tensors alone, so that any size fits in memory."
)
_ALLOW_PICKLE = click.option(
    "--allow-pickle", is_flag=True, help="Read pytorch_model.bin where there is no safetensors (tensors only, no code)."
)
_MODEL = click.option(
    "--model",
    metavar="HF_DIR",
    type=_Text(),
    help="Folder with the config.json and tokenizer of a checkpoint; default: what its run's config.yaml names.",
)
_ROLE = click.option("--role", metavar="ROLE", type=_Text(), help="Whose weights, of a checkpoint of `mrl ppo`; default: actor.")  # fmt: skip


@convert.command("import")
@click.argument("source", metavar="HF|GGUF", type=_Text())
@click.argument("out", type=_Text())
@click.option(
    "--tokenizer",
    metavar="HF_DIR",
    type=_Text(),
    help="Folder with the tokenizer of a GGUF file; default: what transformers makes of the file.",
)
@_ALLOW_PICKLE
@_VERIFY
@_NO_LOGITS
def convert_import(
    source: str, out: str, tokenizer: str | None, allow_pickle: bool, check: bool, no_logits: bool
) -> None:
    """Make an mcore distributed checkpoint OUT of a Hugging Face folder, a hub id as in Qwen/Qwen3-0.6B, or a GGUF file
    (pip install 'mrl[gguf]').

    Any layout loads it: name it in model.path to train from it. One that was interrupted goes on where it was.
    """
    _check_flags(check, no_logits)
    with _conversion(out):
        from mrl.convert.importing import import_hf
        from mrl.convert.progress import ProgressBar

        with ProgressBar("imported") as bar:
            done = import_hf(source, out, allow_pickle=allow_pickle, tokenizer=tokenizer, progress=bar)
    for note in done.notes:
        click.echo(note)
    click.echo(f"{out}: {done.tensors} tensors of {source} are {done.parameters} of the checkpoint, all accounted for")
    if check:
        _verify_result(source, out, model=None, role=None, allow_pickle=allow_pickle, logits=not no_logits)


@convert.command("export")
@click.argument("ckpt", type=_Text())
@click.argument("out", type=_Text())
@_MODEL
@_ROLE
@click.option(
    "--max-shard-size",
    metavar="SIZE",
    type=_Text(),
    help="Cut files at this size, as in 5GB, 500MB, 1GiB or a number of bytes; default: files as in the Hugging Face folder that the model comes from.",
)
@click.option(
    "--adapter",
    is_flag=True,
    help="Of a run with adapters: write them alone, for peft; default: merge them into the model.",
)
@_VERIFY
@_NO_LOGITS
def convert_export(
    ckpt: str, out: str, model: str | None, role: str | None, max_shard_size: str | None, adapter: bool, check: bool,
    no_logits: bool,
) -> None:  # fmt: skip
    """Make a Hugging Face folder OUT of CKPT: a checkpoint (Megatron or FSDP), an imported one, or a run's output_dir."""
    _check_flags(check, no_logits)
    if adapter and max_shard_size is not None:
        raise UserError("--max-shard-size: has no effect with --adapter, which writes one file; leave it out")
    with _conversion(out):
        from mrl.convert.exporting import export_adapter, export_hf
        from mrl.convert.progress import ProgressBar
        from mrl.convert.sources import checkpoint_folder

        place = str(checkpoint_folder(ckpt))  # a run that goes on may have saved another one when this is verified
        with ProgressBar("exported") as bar:
            if adapter:
                done = export_adapter(place, out, model=model, role=role)
            else:
                done = export_hf(place, out, model=model, role=role, max_shard_size=max_shard_size, progress=bar)
    files = f"{done.files} file{'s' * (done.files != 1)}"
    loads = "peft" if adapter else "transformers"
    click.echo(f"{out}: {done.tensors} tensors in {files}, all accounted for (from {done.what}); loadable with {loads}")
    for note in done.notes:
        click.echo(note)
    if check:
        _verify_result(
            place, out, model=model, role=role, allow_pickle=False, logits=not no_logits, own_base=adapter
        )  # fmt: skip


@convert.command("verify")
@click.argument("a", type=_Text())
@click.argument("b", type=_Text())
@click.option(
    "--prompt",
    "prompts",
    metavar="TEXT",
    type=_Text(),
    multiple=True,
    help="Compare logits on this text; may be repeated. Default: five texts of ours.",
)
@click.option("--no-logits", is_flag=True, help="Compare tensors alone: no model is built, so any size fits in memory.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object in place of the table.")
@_MODEL
@_ROLE
@_ALLOW_PICKLE
def convert_verify(a: str, b: str, prompts: tuple[str, ...], no_logits: bool, as_json: bool, **given: Any) -> None:
    """Compare A and B: Hugging Face folders or hub ids, GGUF files, checkpoints, or runs, in any combination.

    Tensors bit for bit, then logits on the CPU in fp32. Exit code 2 where something differs.
    """
    found = _compare(a, b, prompts=prompts, logits=not no_logits, **given)
    _show(found, as_json=as_json)
    if not found.same:
        click.get_current_context().exit(EXIT_USER_ERROR)


def _compare(
    a: str, b: str, *, model: str | None, role: str | None, allow_pickle: bool, prompts: tuple[str, ...] = (),
    logits: bool = True, own_base: bool = False,
) -> Comparison:  # fmt: skip
    """How two models compare. own_base: B is adapters over the base that they name, not `model`."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # megatron computes on a GPU wherever it sees one
    from mrl.launch.preflight import quiet

    with quiet():
        from mrl.convert.opening import open_any
        from mrl.convert.progress import ProgressBar
        from mrl.convert.verifying import compare

        given = {"model": model, "role": role, "allow_pickle": allow_pickle}
        given_b = given | ({"model": None} if own_base else {})
        with open_any(a, **given) as of_a, open_any(b, **given_b) as of_b, ProgressBar("compared") as bar:
            return compare(of_a, of_b, prompts=prompts, logits=logits, progress=bar)


def _show(found: Comparison, *, as_json: bool = False) -> None:
    import json

    from mrl.convert.verifying import table

    click.echo(json.dumps(found.as_json()) if as_json else table(found))


def _check_flags(check: bool, no_logits: bool) -> None:
    if no_logits and not check:
        raise UserError("--no-logits: has no effect without --verify; give both, or leave it out")


def _verify_result(source: str, out: str, **given: Any) -> None:
    """What `--verify` does: a result that differs loses its name, and so does one that could not be compared."""
    try:
        found = _compare(source, out, **given)
    except UserError as error:
        raise UserError(f"{error}; nothing was compared, and {out} is now {_renamed(out, 'unverified')}") from None
    except Exception:
        _say(f"{out}: could not be compared with {source}; it is now {_renamed(out, 'unverified')}")
        raise
    _show(found)
    if not found.same:
        raise UserError(f"{out}: differs from {source}; it is now {_renamed(out, 'different')}, and not to be used")


def _renamed(out: str, why: str) -> str:
    """The new name of the folder `out`, which ends in `why`."""
    out = out.rstrip("/")
    names = (f"{out}.{why}{n}" for n in itertools.chain([""], itertools.count(2)))
    new = next(name for name in names if not os.path.exists(name))
    os.rename(out, new)
    return new


@contextlib.contextmanager
def _conversion(out: str) -> Iterator[None]:
    """Without the warnings of libraries; and Ctrl-C in words."""
    from mrl.launch.preflight import quiet

    try:
        with quiet():
            yield
    except KeyboardInterrupt:
        _say(f"interrupted: {out} is not there; the same command goes on where it was")
        click.get_current_context().exit(EXIT_INTERRUPTED)


add_examples(main, "mrl")
