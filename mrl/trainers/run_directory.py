"""A run's directory: what is in it, where a run starts from, and who it belongs to.

Everything here touches files only and is called on the main process (`engine.on_main`).
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import pathlib
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import mrl
from mrl.batch import Batch
from mrl.config.command import Config, RowsRunConfig, command_of
from mrl.config.load import dump_config
from mrl.config.schema import CheckpointConfig
from mrl.config.urls import shown_url, without_queries, write_text
from mrl.engine import atomic_checkpoint, checkpoint_remote
from mrl.errors import unwritable
from mrl.trainers import used_folder
from mrl.weights.pt_file import write_pt

HEADER = "# Written by mrl: the resolved config of this run. `mrl {command}` takes this file.\n"
PACKAGES = ("torch", "megatron-core", "transformers", "transformer-engine")


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """Names of what is in the directory `path`."""

    path: pathlib.Path

    @property
    def config(self) -> pathlib.Path:
        return self.path / "config.yaml"

    @property
    def checkpoints(self) -> pathlib.Path:
        return self.path / "checkpoints"

    @property
    def hf(self) -> pathlib.Path:
        return self.path / "hf"

    @property
    def samples(self) -> pathlib.Path:
        """Rollouts as JSONL."""
        return self.path / "samples"

    @property
    def pending(self) -> pathlib.Path:
        """Samples that are not trained on yet, until the run ends."""
        return self.path / "pending"

    @property
    def partial_hf(self) -> pathlib.Path:
        """The folder in which an export is written before it gets its name: beside what `hf` is, or leads to."""
        whole = self.hf.resolve()
        return whole.with_name(f".tmp-{whole.name}")

    def prepare(self, config: Config, command_line: str, notes: Sequence[str] = ()) -> None:
        """Makes the directory and writes config.yaml, with comment lines of `notes`, at once or not at all.

        Removes what an interrupted save left, because it may fill the disk.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        atomic_checkpoint.tidy(str(self.checkpoints))
        temporary = self.path / "config.yaml.tmp"
        header = (
            HEADER.format(command=command_of(type(config)).name)
            + _provenance(command_line)
            + "".join(f"# {note}\n" for note in notes)
        )
        try:
            write_text(temporary, header + dump_config(config))
        except OSError as error:
            raise unwritable(str(self.path), temporary, error) from error
        os.replace(temporary, self.config)

    def save_failed_batch(self, step: int, batch: Batch, rows: Sequence[str]) -> pathlib.Path:
        """Keeps the global mini-batch that `step` failed on. rows: the file and line of each sequence."""
        path = self.path / "failed" / f"step_{step}.pt"
        tensors = {
            name: getattr(batch, name) for name in ("tokens", "labels", "loss_mask", "lengths", "multi_modal_inputs")
        }
        write_pt(path, {"step": step, "rows": list(rows), **tensors})
        return path

    def name_best(self, name: str, remote: str | None) -> None:
        """Writes the name of the best checkpoint yet to checkpoints/best, and beside the copies at `remote`."""
        if (self.checkpoints / name).exists():
            temporary = self.checkpoints / f"{atomic_checkpoint.BEST}.tmp"
            temporary.write_text(f"{name}\n", encoding="utf-8")
            os.replace(temporary, self.checkpoints / atomic_checkpoint.BEST)
        if remote is not None:
            checkpoint_remote.name_best(remote, name)

    def best(self) -> tuple[str, ...]:
        """Returns the name of the best checkpoint, where there is one."""
        named = self.checkpoints / atomic_checkpoint.BEST
        return (named.read_text(encoding="utf-8", errors="replace").strip(),) if named.is_file() else ()

    def forget_export(self) -> None:
        """Removes the exported model of an earlier, shorter run, before the checkpoint that it would not belong to."""
        for folder in (self.hf.resolve(), self.partial_hf):
            if folder.exists():
                shutil.rmtree(folder)

    def publish_export(self) -> None:
        """Gives a whole export its name."""
        partial, whole = self.partial_hf, self.hf.resolve()
        if whole.exists():
            shutil.rmtree(whole)
        os.rename(partial, whole)


@dataclasses.dataclass(frozen=True)
class StartState:
    """The state that a run begins from."""

    checkpoint: str | None  # its folder; None at the beginning
    step: int  # optimizer steps made
    message: str  # says so to the user


def choose_start(
    run: RunDirectory, config: RowsRunConfig, damaged: Mapping[str, str] = MappingProxyType({})
) -> StartState:
    """Decides by `checkpoint.resume`, as `used_folder.find_start`, which may download it."""
    own = used_folder.find_start(run.path, config, damaged, checkpoint_remote.fetch)
    if own is None:
        return StartState(None, 0, f"starting in {run.path}")
    if used_folder.same_folder(os.path.dirname(own), str(run.checkpoints)):
        own = atomic_checkpoint.finish_rename(own)  # no save may follow that would do it
    step = atomic_checkpoint.validate(own).step
    return StartState(own, step, f"resuming from {own}, after step {step}")


def is_own(run: RunDirectory, start: StartState, saved: Mapping[str, Any], config: CheckpointConfig) -> bool:
    """Returns whether this run saved the checkpoint of `start`, and another one did not. saved: the config that is in
    it.

    Its folder tells, but for one that was fetched from the URL in `checkpoint.resume`: it lies in our folder too. Our
    own, saved later, have that URL in their config; a copy in `checkpoint.remote` is our own.
    """
    if start.checkpoint is None or not used_folder.same_folder(os.path.dirname(start.checkpoint), str(run.checkpoints)):
        return False
    if "://" not in config.resume or (config.remote is not None and config.resume.startswith(config.remote)):
        return True
    return shown_url(saved["checkpoint"]["resume"]) == shown_url(config.resume)


def copy_missed(run: RunDirectory, start: StartState, config: CheckpointConfig) -> None:
    """Copies the run's own newest checkpoint to `checkpoint.remote` where a kill came between the save and its copy."""
    if start.checkpoint is None or config.remote is None:
        return
    if used_folder.same_folder(os.path.dirname(start.checkpoint), str(run.checkpoints)):
        checkpoint_remote.ensure(start.checkpoint, config.remote, keep=config.keep, protect=run.best())


def _provenance(command_line: str) -> str:
    """Comment lines with versions, git state and the command line."""
    lines = ["versions: " + ", ".join(f"{name} {version}" for name, version in versions().items())]
    command = without_queries(" ".join(command_line.split())) or "none, started from Python"
    lines += [f"{name}: {state}" for name, state in git_states().items()] + [f"command: {command}"]
    return "".join(f"# {line}\n" for line in lines)


def versions() -> dict[str, str]:
    """Returns the versions of mrl, Python and the packages that numbers may depend on."""
    versions_by_name = {"mrl": mrl.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions_by_name[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions_by_name[package] = "absent"
    return versions_by_name


def git_states() -> dict[str, str]:
    """Returns the commit of the working directory, and that of mrl's own checkout, or mrl's version without one."""
    here, own = git_state(os.getcwd()), pathlib.Path(mrl.__file__).parents[1]
    is_checkout = (own / ".git").exists()  # a wheel's folder may lie below somebody else's repository
    return {"git": here, "git of mrl": git_state(own) if is_checkout else f"none, version {mrl.__version__}"}


def git_state(folder: str | os.PathLike[str]) -> str:
    """Returns the commit of a folder, and whether files that git knows have changed."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return "not a git repository"
    return commit + (f", {len(changed.splitlines())} files changed since" if changed else ", clean")


def _git(folder: str | os.PathLike[str], *arguments: str) -> str:
    line = ["git", "-C", os.fspath(folder), *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
