"""The whole checkpoint that a path stands for, also while a run adds some and removes others."""

from __future__ import annotations

import re
from pathlib import Path

from mrl.engine import atomic_checkpoint
from mrl.engine.atomic_checkpoint import LATEST, MARKER, names_checkpoint
from mrl.errors import CheckpointError, UserError
from mrl.weights.mcore_weights import DESCRIPTION, FOLDER

READING_ERRORS = (OSError, RuntimeError, UserError)
"""Errors of reading a checkpoint whose files a run removes."""


def checkpoint_folder(path: str | Path) -> Path:
    """Returns the whole checkpoint at `path`: itself, the one that a file of `POINTERS` names, or the newest in it.

    A run in progress soon has a newer one.
    """
    path = Path(path)
    if names_checkpoint(path):
        path = path.parent / path.read_text(encoding="utf-8").strip()
    if not path.is_dir():
        check_not_removed(path)
        fix = f"give a checkpoint such as runs/demo/checkpoints/{atomic_checkpoint.step_name(100)}, or a run"
        raise CheckpointError(path, why="no such folder", fix=fix)
    if (path / MARKER).is_file():
        return path
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    checkpoint = atomic_checkpoint.find_checkpoint(str(root))
    if checkpoint is None:
        wrong = atomic_checkpoint.damage(str(root))
        if wrong:
            raise CheckpointError(f"{'; '.join(wrong)}; no checkpoint in {root} is whole")
        if (path / FOLDER).is_dir() and (path / DESCRIPTION).is_file():
            why = f"has no {MARKER}: it is no whole checkpoint"
            raise CheckpointError(path, why=why, fix="make it again, or use another")
        if (path / "config.json").is_file():
            why = "is a Hugging Face folder, and an export starts from a checkpoint"
            raise CheckpointError(path, why=why, fix="see `mrl convert import`")
        if (path.parent / MARKER).is_file():
            raise CheckpointError(path, why=f"is a part of the checkpoint {path.parent}", fix="give that")
        fix = f"give one such as runs/demo/checkpoints/{atomic_checkpoint.step_name(100)}, or a run"
        raise CheckpointError(path, why="holds no whole checkpoint of mrl", fix=fix)
    return Path(checkpoint)


FIX = "give the run again, or raise its checkpoint.keep"


def removed(folder: Path) -> CheckpointError:
    """Returns the error on a checkpoint that was removed while it was read, as a run does."""
    return CheckpointError(folder, why="was removed while it was read", fix=FIX)


def check_not_removed(folder: Path) -> None:
    """Raises CheckpointError if a checkpoint is not there and its run has a newer one."""
    latest = folder.parent / LATEST
    if not re.fullmatch(r"step_\d+", folder.name) or folder.exists():
        return
    if latest.is_file() and folder.name < latest.read_text(encoding="utf-8").strip():
        why = "is not there any more, or never was, and its run has a newer one"
        raise CheckpointError(folder, why=why, fix=FIX)
