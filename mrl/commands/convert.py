"""`mrl convert`: weights between Hugging Face folders and mcore checkpoints."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mrl.commands import EXIT_USER_ERROR, JSON, Argument, Command, Group, Option, echo, say
from mrl.errors import UserError
from mrl.trainers.waits import fewer_collections
from mrl.words import pluralize

if TYPE_CHECKING:
    from mrl.convert.verifying import Comparison

_VERIFY = Option(
    names="--verify", into="check", kind="flag",
    help="Compare the result with the source at once, as `mrl convert verify` does.",
)  # fmt: skip
_NO_LOGITS = Option(
    names="--no-logits", kind="flag", help="With --verify: compare tensors alone, so that any size fits in memory."
)
_MODEL = Option(
    names="--model", metavar="HF_DIR",
    help="Folder with the config.json and tokenizer of a checkpoint; default: what its run's config.yaml names.",
)  # fmt: skip
_ROLE = Option(names="--role", metavar="ROLE", help="Whose weights, of a checkpoint of `mrl ppo`; default: actor.")


@contextlib.contextmanager
def _on_files() -> Iterator[None]:
    """Makes a message of an error of the file system, too."""
    try:
        with fewer_collections():  # torch and transformers are imported inside
            yield
    except OSError as error:
        if error.errno == errno.EPIPE or error.filename is None:
            raise
        name = str(error.filename)[:200]
        raise UserError(name, why=str(error.strerror), fix="give another path, or put it right") from error


@_on_files()
def import_(source: str, out: str, check: bool, no_logits: bool) -> None:
    _check_flags(check, no_logits)
    with _conversion(out):
        from mrl.convert.importing import import_hf
        from mrl.convert.workspace import ProgressLines

        done = import_hf(source, out, progress=ProgressLines("imported"))
    for note in done.notes:
        echo(note)
    echo(f"{out}: {done.tensors} tensors of {source} are {done.parameters} of the checkpoint, all accounted for")
    if check:
        _verify_result(source, out, model=None, role=None, logits=not no_logits)


@_on_files()
def export(
    ckpt: str, out: str, model: str | None, role: str | None, max_shard_size: str | None, adapter: bool, check: bool,
    no_logits: bool,
) -> None:  # fmt: skip
    _check_flags(check, no_logits)
    if adapter and max_shard_size is not None:
        why = "has no effect with --adapter, which writes one file"
        raise UserError("--max-shard-size", why=why, fix="leave it out")
    with _conversion(out):
        from mrl.convert.exporting import export_adapter, export_hf
        from mrl.convert.workspace import ProgressLines

        if adapter:
            done = export_adapter(ckpt, out, model=model, role=role)
        else:
            progress = ProgressLines("exported")
            done = export_hf(ckpt, out, model=model, role=role, max_shard_size=max_shard_size, progress=progress)
    files = pluralize(done.files, "file")
    loads = "peft" if adapter else "transformers"
    echo(f"{out}: {done.tensors} tensors in {files}, all accounted for (from {done.what}); loadable with {loads}")
    for note in done.notes:
        echo(note)
    if check:
        _verify_result(  # a run that goes on may have saved another one since
            str(done.place), out, model=model, role=role, logits=not no_logits, own_base=adapter
        )  # fmt: skip


@_on_files()
def verify(a: str, b: str, prompts: tuple[str, ...], no_logits: bool, as_json: bool, **given: Any) -> int:
    comparison = _compare(a, b, prompts=prompts, logits=not no_logits, **given)
    _show(comparison, as_json=as_json)
    return 0 if comparison.same else EXIT_USER_ERROR


def _compare(
    a: str, b: str, *, model: str | None, role: str | None, prompts: tuple[str, ...] = (),
    logits: bool = True, own_base: bool = False,
) -> Comparison:  # fmt: skip
    """Returns how two models compare. own_base: B is adapters over the base that they name, not `model`."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # megatron computes on a GPU wherever it sees one
    from mrl.launch.preflight import quiet

    with quiet():
        from mrl.convert.sources import open_any
        from mrl.convert.verifying import compare
        from mrl.convert.workspace import ProgressLines

        model_b = None if own_base else model
        with (
            open_any(a, model=model, role=role) as of_a,
            open_any(b, model=model_b, role=role) as of_b,
        ):
            return compare(of_a, of_b, prompts=prompts, logits=logits, progress=ProgressLines("compared"))


def _show(found: Comparison, *, as_json: bool = False) -> None:
    import json

    from mrl.convert.verifying import table

    echo(json.dumps(found.as_json()) if as_json else table(found))


def _check_flags(check: bool, no_logits: bool) -> None:
    if no_logits and not check:
        raise UserError("--no-logits", why="has no effect without --verify", fix="give both, or leave it out")


def _verify_result(source: str, out: str, **given: Any) -> None:
    """Does what `--verify` asks for: a result loses its name if it differs, or could not be compared."""
    try:
        comparison = _compare(source, out, **given)
    except UserError as error:
        raise error.going_on(f"nothing was compared, and {out} is now {_renamed(out, 'unverified')}") from None
    except Exception:
        say(f"{out}: could not be compared with {source}; it is now {_renamed(out, 'unverified')}")
        raise
    _show(comparison)
    if not comparison.same:
        fix = f"it is now {_renamed(out, 'different')}, and not to be used"
        raise UserError(out, why=f"differs from {source}", fix=fix)


def _renamed(out: str, why: str) -> str:
    """Returns the new name of the folder `out`, which ends in `why`."""
    out = out.rstrip("/")
    names = (f"{out}.{why}{n}" for n in itertools.chain([""], itertools.count(2)))
    new = next(name for name in names if not os.path.exists(name))
    os.rename(out, new)
    return new


@contextlib.contextmanager
def _conversion(out: str) -> Iterator[None]:
    """Hides the warnings of libraries, and puts Ctrl-C in words."""
    from mrl.launch.preflight import quiet

    try:
        with quiet():
            yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted: {out} is not there; the same command goes on where it was") from None


IMPORT = Command(
    help="""Make an mcore distributed checkpoint OUT of a Hugging Face folder or a hub id as in Qwen/Qwen3-0.6B.

    Any layout loads it: name it in model.path to train from it. One that was interrupted goes on where it was.
    """,
    examples="""
        mrl convert import path/to/hf-model model-mcore --verify
        mrl convert import Qwen/Qwen3-0.6B model-mcore""",
    run=import_,
    params=(
        Argument(name="source", metavar="HF"),
        Argument(name="out"),
        _VERIFY,
        _NO_LOGITS,
    ),
)  # fmt: skip

EXPORT = Command(
    help="Make a Hugging Face folder OUT of CKPT: a checkpoint (Megatron or FSDP), an imported one, a run's "
    "output_dir, or an adapter folder, which is merged into its base.",
    examples="""
        mrl convert export runs/demo exported --verify
        mrl convert export runs/demo/checkpoints/step_00000100 exported --max-shard-size 5GB
        mrl convert export runs/demo-rl critic --role critic""",
    run=export,
    params=(
        Argument(name="ckpt"),
        Argument(name="out"),
        _MODEL,
        _ROLE,
        Option(
            names="--max-shard-size", metavar="SIZE",
            help="Cut files at this size, as in 5GB, 500MB, 1GiB or a number of bytes; default: 5GB, and for an import "
            "the files that it was made from.",
        ),
        Option(
            names="--adapter", kind="flag",
            help="Of a run with adapters: write them alone, for peft; default: merge them into the model.",
        ),
        _VERIFY,
        _NO_LOGITS,
    ),
)  # fmt: skip

VERIFY = Command(
    help="""Compare A and B: Hugging Face folders or hub ids, checkpoints, or runs, in any combination.

    Tensors bit for bit, then logits on the CPU in fp32. Exit code 2 where something differs.
    """,
    examples="""
        mrl convert verify path/to/hf-model model-mcore
        mrl convert verify path/to/hf-model exported --prompt "2+2=" --json""",
    run=verify,
    params=(
        Argument(name="a"),
        Argument(name="b"),
        Option(
            names="--prompt", into="prompts", metavar="TEXT", several=True,
            help="Compare logits on this text; may be repeated. Default: five texts of ours.",
        ),
        Option(
            names="--no-logits", kind="flag",
            help="Compare tensors alone: no model is built, so any size fits in memory.",
        ),
        JSON,
        _MODEL,
        _ROLE,
    ),
)  # fmt: skip

COMMAND = Group(
    help="Convert weights between Hugging Face folders and mcore checkpoints, and compare them. No GPU is needed.",
    examples="""
        mrl convert import path/to/hf-model model-mcore --verify
        mrl convert export runs/demo exported
        mrl convert verify path/to/hf-model model-mcore""",
    commands={"import": IMPORT, "export": EXPORT, "verify": VERIFY},
)
