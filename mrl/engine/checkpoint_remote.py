"""Copies checkpoints to an fsspec URL (s3, gs, hdfs, file, memory, ...), under the same names and marker.

Object stores have no rename, so wholeness there is the marker alone: it is copied after every other file and deleted
before any other. Called by one rank.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Collection

import fsspec
import fsspec.exceptions

from mrl.engine import atomic_checkpoint
from mrl.engine.atomic_checkpoint import BEST, LATEST, MARKER, PREFIX, Marker
from mrl.errors import CheckpointError, ConfigError, quoted

logger = logging.getLogger(__name__)

FILE_SYSTEM_ERRORS = (OSError, fsspec.exceptions.FSTimeoutError)
PAUSES_S = (1.0, 10.0, 30.0)
"""Pauses between attempts to upload. A long run must not end because an object store refuses for a moment."""


def probe(url: str) -> None:
    """Writes a small file at `url` and removes it.

    Raises ConfigError if that fails, because no copy could be made there.
    """
    try:
        files, base = _open(url)
        files.makedirs(base, exist_ok=True)
        name = f"{base}/.mrl-probe-{secrets.token_hex(4)}"
        files.pipe_file(name, b"mrl")
        files.rm_file(name)
    except Exception as error:  # file systems have no common class of errors
        why = f"cannot be written ({_reason(error)})"
        fix = "give a URL that this machine can write to, or null"
        raise ConfigError("checkpoint.remote", quoted(url), why, fix) from error


def upload(path: str, url: str, *, keep: int | None = None, protect: Collection[str] = ()) -> None:
    """Copies the whole checkpoint at `path` to `url/step_XXXXXXXX`, its marker last.

    keep: how many of the newest whole checkpoints stay at the URL, None for all. Half copies of killed runs are
    deleted. protect: names of folders that stay as well. After an error of the file system it waits for each of
    PAUSES_S in turn and starts the copy again. Then it raises CheckpointError.
    """
    _persist(
        lambda: _upload(path, url, keep, protect),
        f"{path} cannot be copied to {url}",
        f"the checkpoint in {path} is whole: when {url} can be written again, the same command copies it and goes on",
    )


def name_best(url: str, name: str) -> None:
    """Writes `url/best`, the name of the best checkpoint so far, if the URL has that one. Retries as `upload` does."""

    def write() -> None:
        files, base = _open(url)
        if files.exists(f"{base}/{name}/{MARKER}"):
            files.pipe_file(f"{base}/{BEST}", f"{name}\n".encode())

    _persist(write, f"the name of the best checkpoint, {name}, cannot be written at {url}", "the same command goes on")


def _persist(write: Callable[[], None], failure: str, advice: str) -> None:
    """Calls `write` until the file system does not refuse, at most len(PAUSES_S) + 1 times; then CheckpointError."""
    for pause_s in (*PAUSES_S, None):
        try:
            write()
            return
        except FILE_SYSTEM_ERRORS as error:
            if pause_s is None:
                why = f"{failure} ({_reason(error)}; tried {len(PAUSES_S) + 1} times)"
                raise CheckpointError("checkpoint.remote", why=why, fix=advice) from error
            logger.warning("%s (%s); again in %g s", failure, _reason(error), pause_s)
            time.sleep(pause_s)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _upload(path: str, url: str, keep: int | None, protect: Collection[str]) -> None:
    marker = atomic_checkpoint.verify(path)  # a damaged one must not push whole ones out
    files, base = _open(url)
    name = atomic_checkpoint.step_name(marker.step)
    target = f"{base}/{name}"
    _delete(files, target)
    for file in marker.files:
        remote = f"{target}/{file}"
        files.makedirs(os.path.dirname(remote), exist_ok=True)
        files.put_file(os.path.join(path, file), remote)
    _check_sizes(files, target, marker)
    files.put_file(os.path.join(path, MARKER), f"{target}/{MARKER}")
    files.pipe_file(f"{base}/{LATEST}", f"{name}\n".encode())
    if keep is not None:
        outdated = [path for path, _ in _whole(files, base)[:-keep] if os.path.basename(path) not in protect]
        for old in outdated + _unmarked(files, base):
            _delete(files, old)


def ensure(path: str, url: str, *, keep: int | None, protect: Collection[str]) -> None:
    """Uploads the checkpoint at `path` unless `url` has it whole. A kill may have come between a save and its copy."""
    marker = atomic_checkpoint.validate(path)
    files, base = _open(url)
    files.invalidate_cache()
    if marker not in [there for _, there in _whole(files, base)]:
        upload(path, url, keep=keep, protect=protect)


def fetch(url: str, root: str) -> str | None:
    """Copies the newest whole checkpoint at `url` (or the one that `url` is) into `root`. Returns its folder.

    Returns None if the URL holds no whole checkpoint. One that is already in `root` is not copied again.
    """
    files, base = _open(url)
    files.invalidate_cache()
    if files.exists(f"{base}/{MARKER}"):
        marker = atomic_checkpoint.parse_marker(url, files.cat_file(f"{base}/{MARKER}"))
        _check_sizes(files, base, marker)
        source = base
    else:
        whole = _whole(files, base, warn=True)
        if not whole:
            return None
        source, marker = whole[-1]
    final = os.path.join(root, atomic_checkpoint.step_name(marker.step))
    with contextlib.suppress(CheckpointError):  # a local copy that is absent or damaged is fetched again
        if atomic_checkpoint.validate(final) == marker and atomic_checkpoint.verify(final) == marker:
            return final
    with atomic_checkpoint.replace_folder(root, atomic_checkpoint.step_name(marker.step)) as temporary:
        for file in [*marker.files, MARKER]:
            local = os.path.join(temporary, file)
            os.makedirs(os.path.dirname(local), exist_ok=True)
            files.get_file(f"{source}/{file}", local)
        atomic_checkpoint.validate(temporary)
    return final


def _open(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Returns the file system of a URL and the path in it."""
    try:
        files, base = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        fix = "use a URL that fsspec knows, as s3://bucket/folder"
        raise CheckpointError("checkpoint.remote", quoted(url), f"cannot be opened ({error})", fix) from error
    return files, base.rstrip("/")


def _whole(files: fsspec.AbstractFileSystem, base: str, *, warn: bool = False) -> list[tuple[str, Marker]]:
    """Returns the whole checkpoints under `base`, oldest first."""
    checkpoints = []
    for path in sorted(files.ls(base, detail=False)) if files.exists(base) else []:
        path = path.rstrip("/")
        if not os.path.basename(path).startswith(PREFIX) or not files.exists(f"{path}/{MARKER}"):
            continue
        try:
            marker = atomic_checkpoint.parse_marker(path, files.cat_file(f"{path}/{MARKER}"))
            _check_sizes(files, path, marker)
        except CheckpointError as error:
            if warn:
                logger.warning("passed over %s", error)
            continue
        checkpoints.append((path, marker))
    return sorted(checkpoints, key=lambda item: (item[1].serial, item[0]))


def _unmarked(files: fsspec.AbstractFileSystem, base: str) -> list[str]:
    """Returns the folders of checkpoints without a marker."""
    paths = [path.rstrip("/") for path in files.ls(base, detail=False)]
    return [p for p in paths if os.path.basename(p).startswith(PREFIX) and not files.exists(f"{p}/{MARKER}")]


def _check_sizes(files: fsspec.AbstractFileSystem, path: str, marker: Marker) -> None:
    """Refuses a copy that lacks files or has files of another size."""
    present = {full[len(path) :].lstrip("/"): entry["size"] for full, entry in files.find(path, detail=True).items()}
    for file, entry in marker.files.items():
        if present.get(file) != entry["size"]:
            raise CheckpointError(
                path,
                why=f"damaged: {file} has {present.get(file, 'no')} bytes and was saved with {entry['size']}",
                fix="use another checkpoint",
            )


def _delete(files: fsspec.AbstractFileSystem, path: str) -> None:
    """Deletes a checkpoint, its marker first."""
    if files.exists(f"{path}/{MARKER}"):
        files.rm_file(f"{path}/{MARKER}")
    if files.exists(path):
        files.rm(path, recursive=True)


def locate(local: str, remote: str | None, *, backend: str) -> str:
    """Returns the folder to load: the one of `remote`, fetched into `local`, else the newest whole one. For one rank.

    Raises CheckpointError if there is none, or it is damaged, foreign or of another backend.
    """
    path = (fetch(remote, local) if remote else None) or atomic_checkpoint.find_checkpoint(local)
    if path is None:
        raise CheckpointError(remote or local, why="holds no whole checkpoint", fix="name one that does")
    atomic_checkpoint.validate(path, backend=backend)
    return path
