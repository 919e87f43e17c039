"""Writes checkpoint folders that are whole or absent, whatever an engine puts inside.

    checkpoints/
        step_00000100/          a whole checkpoint: its last file to appear inside was COMPLETE
            COMPLETE            JSON: what this is, the step, and every file with its size and checksum
            ...                 the engine's files
        latest                  the name of the newest whole one, replaced atomically, for people and scripts
        .tmp-step_00000200/     being written; becomes step_00000200 by one rename
        .trash-step_00000050/   being deleted

A folder gets its final name after all its files are on disk, COMPLETE last. It is renamed away before any of its files
is deleted. So each `step_*` folder is whole at any moment, and a kill loses only the checkpoint being written. The
marker's `serial` gives the order in time, not the step: a run that resumes from an older checkpoint writes smaller
steps later.

Every file has a checksum. Ranks divide the files among them: at a save to compute checksums, and before a load to
compare them (`verify`). A search for a checkpoint (`validate`) checks only sizes and the checksums of small files.

All ranks write into one folder, on storage that every node sees. Only rank 0 touches shared files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mrl
from mrl.config.backends import OWN_KEYS
from mrl.errors import CheckpointError, DamagedCheckpoint
from mrl.weights.checksums import crc32_of
from mrl.weights.fsync import fsync_path, write_synced
from mrl.weights.json_file import parse_json

logger = logging.getLogger(__name__)

MARKER = "COMPLETE"
LATEST = "latest"
BEST = "best"
POINTERS = (LATEST, BEST)
"""Files in a run's checkpoints folder. Each holds the name of a checkpoint."""
FORMAT = "mrl-checkpoint"
FORMAT_VERSION = 2
ROLES = "roles"
"""The `backend` of a checkpoint with a folder for each role; each names its own engine."""
PREFIX, TEMPORARY, TRASH = "step_", ".tmp-", ".trash-"
SMALL_BYTES = 2**20
"""Checksums of files up to this size are compared at every search, those of larger ones before a load."""
THREADS = 4  # of each rank; crc32 runs outside the interpreter's lock


@dataclasses.dataclass(frozen=True)
class RankGroup:
    """Holds this rank's number, the number of ranks, and a gather over them."""

    rank: int
    size: int
    gather: Callable[[Any], Sequence[Any]]  # collective, and a barrier: returns the values of all in rank order
    group: Any = None  # torch's process group of the ranks, None for the default one

    def share(self, items: Sequence[str]) -> Sequence[str]:
        """Returns this rank's share of `items`, a list that is the same on all ranks."""
        return items[self.rank :: self.size]


ONE_RANK = RankGroup(0, 1, lambda value: [value])


@dataclasses.dataclass(frozen=True)
class Marker:
    """Holds the content of COMPLETE."""

    step: int
    serial: int
    backend: str
    mrl_version: str
    files: dict[str, dict]  # path inside the checkpoint -> {"size": bytes, "crc32": checksum}


def step_name(step: int) -> str:
    """Returns the folder name of a step: `step_00000100`."""
    return f"{PREFIX}{step:08d}"


@contextlib.contextmanager
def writing(
    root: str,
    step: int,
    *,
    backend: str,
    ranks: RankGroup = ONE_RANK,
    keep: int | None = None,
    protect: Collection[str] = (),
) -> Iterator[str]:
    """Gives all ranks a folder to write a checkpoint into. On a clean exit it becomes `root/step_XXXXXXXX`.

    Collective. backend: the engine that writes the files. keep: how many of the newest whole checkpoints stay, None for
    all. Older ones are deleted after the new one is whole, except folders named in `protect`. An exception inside
    leaves the temporary folder. No reader takes that for a checkpoint, and the next save or start removes it.
    """
    name = step_name(step)
    temporary = os.path.join(root, TEMPORARY + name)
    if ranks.rank == 0:
        os.makedirs(root, exist_ok=True)
        tidy(root)
        os.mkdir(temporary)
    ranks.gather(None)
    if not os.path.isdir(temporary):
        fix = "put checkpoints on storage all nodes share"
        raise CheckpointError(root, why=f"rank {ranks.rank} does not see the folder that rank 0 made", fix=fix)
    yield temporary
    files = _settle(temporary, ranks)
    if ranks.rank == 0:
        serial = 1 + max((marker.serial for _, marker in _whole(root)), default=0)
        write_marker(temporary, files, step=step, serial=serial, backend=backend)
        _publish(root, name)
        if keep is not None:
            _prune(root, keep, protect)
    ranks.gather(None)


@contextlib.contextmanager
def replace_folder(root: str, name: str) -> Iterator[str]:
    """Gives one process a temporary folder for a copy of a whole checkpoint; on a clean exit it is `root/name`."""
    os.makedirs(root, exist_ok=True)
    temporary = os.path.join(root, TEMPORARY + name)
    if os.path.lexists(temporary):
        _remove(temporary)
    os.mkdir(temporary)
    yield temporary
    for folder, _, names in os.walk(temporary):
        for path in [*names, "."]:
            fsync_path(os.path.join(folder, path))
    _publish(root, name)


def find_checkpoint(root: str, but: Collection[str] = ()) -> str | None:
    """Returns the newest whole checkpoint in `root`, or `root` itself if it is one; None if there is none.

    Skips damaged folders, with a warning that names them and the damage. If no whole one exists, `damage` has the
    reasons. but: folders that `verify` has found to be damaged.
    """
    if os.path.exists(os.path.join(root, MARKER)):
        validate(root)
        return None if root in but else root
    whole = [path for path, _ in _whole(root, warn=True) if path not in but]
    return whole[-1] if whole else None


def finish_rename(path: str) -> str:
    """Gives a whole checkpoint its name if a kill came before the rename. Returns its folder."""
    root, name = os.path.split(path)
    if not name.startswith(TEMPORARY):
        return path
    name = name.removeprefix(TEMPORARY)
    _publish(root, name)
    return os.path.join(root, name)


def steps_of(root: str) -> list[tuple[int, str]]:
    """Returns (step, folder) of each whole checkpoint in `root`, oldest first."""
    return [(marker.step, path) for path, marker in _whole(root)]


def damage(root: str) -> list[str]:
    """Returns a line for each `step_*` folder of `root` that is no whole checkpoint, with the reason. Kills leave
    none."""
    lines = []
    for entry in _listdir(root):
        if entry.startswith(PREFIX):
            try:
                validate(os.path.join(root, entry))
            except CheckpointError as error:
                if os.path.isdir(os.path.join(root, entry)):  # not removed meanwhile by its run
                    lines.append(str(error))
    return lines


def validate(path: str, *, backend: str | None = None) -> Marker:
    """Returns the marker of the checkpoint at `path`. Refuses one that is damaged, foreign or of another backend.

    It checks that every file exists and has its size, and the checksums of small files. `verify` reads all of them.
    """
    if not os.path.isdir(path):
        raise CheckpointError(path, why="no such folder", fix=f"name a checkpoint such as checkpoints/{step_name(100)}")
    marker = parse_marker(path, _read_bytes(os.path.join(path, MARKER)))
    if backend is not None and marker.backend != backend:
        raise CheckpointError(path, why=other_backend(marker.backend, backend))
    for file, entry in marker.files.items():
        check_file(path, file, entry, content=entry["size"] <= SMALL_BYTES)
    return marker


def other_backend(saved: str, own: str, key: str = "engine.backend") -> str:
    """Returns why a run of one backend cannot load a checkpoint of another, and a fix. key: the config's key of the
    backend."""
    if saved == ROLES:
        return "holds the roles of `mrl ppo`, and this run has one model; resume it with `mrl ppo`"
    if own == ROLES:
        return (
            "holds one model, as of `mrl sft`, and no roles; export it to Hugging Face and name it in actor.model.path"
        )
    start = (
        "export it to Hugging Face and start from that" if saved in OWN_KEYS else "start from the hf folder of its run"
    )
    return f"was saved by the {saved} engine and this is the {own} engine; set {key} to {saved}, or {start}"


def verify(path: str, ranks: RankGroup = ONE_RANK) -> Marker:
    """Reads every file of the checkpoint at `path` and compares checksums. Returns its marker.

    Collective: each rank reads a share of the files. If one finds damage, all raise DamagedCheckpoint.
    """
    marker, wrong = None, None
    try:
        marker = parse_marker(path, _read_bytes(os.path.join(path, MARKER)))
        largest_first = sorted(marker.files, key=lambda file: (-marker.files[file]["size"], file))
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda f: check_file(path, f, marker.files[f], content=True), ranks.share(largest_first)))
    except CheckpointError as error:
        wrong = str(error)
    if errors := [what for what in ranks.gather(wrong) if what is not None]:
        raise DamagedCheckpoint(errors[0])
    assert marker is not None
    return marker


def names_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Returns whether `path` is a file of `POINTERS`."""
    return os.path.basename(path) in POINTERS and os.path.isfile(path)


def delete(path: str) -> None:
    """Deletes a checkpoint. A kill during it leaves no half checkpoint under its name."""
    root, name = os.path.split(os.path.abspath(path))
    _to_trash(root, name)
    _empty_trash(root)


def parse_marker(path: str, content: bytes | None) -> Marker:
    """Returns the content of COMPLETE. path: the checkpoint, for messages. content: None if the file does not exist."""
    if content is None:
        raise _unusable(path, f"not a whole checkpoint of mrl: it has no {MARKER} file")
    try:
        fields = parse_json(content)
        known, version = fields["format"] == FORMAT, fields["version"]
        marker = Marker(
            fields["step"], fields["serial"], fields["backend"], fields["mrl_version"], dict(fields["files"])
        )
        inside = all(os.path.normpath(os.path.join("/", file)) == f"/{file}" for file in marker.files)
    except (ValueError, KeyError, TypeError) as error:
        raise _unusable(path, f"damaged or foreign: {MARKER} cannot be read ({error!r})") from error
    if not (known and inside):
        raise _unusable(path, f"foreign: {MARKER} is not that of an mrl checkpoint")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            path,
            why=f"has checkpoint format {version} (mrl {marker.mrl_version}) and "
            f"this is mrl {mrl.__version__}, which reads format {FORMAT_VERSION}",
            fix="load it with the mrl that wrote it",
        )
    return marker


def _unusable(path: str, why: str) -> CheckpointError:
    return CheckpointError(path, why=why, fix="use another checkpoint")


def _whole(root: str, *, warn: bool = False) -> list[tuple[str, Marker]]:
    """Returns the whole checkpoints in `root`, oldest first.

    A temporary folder with a marker counts: its writer was killed between the marker and the rename.
    """
    found, damaged = [], []
    for entry in _listdir(root):
        temporary = entry.startswith(TEMPORARY)
        if not entry.removeprefix(TEMPORARY).startswith(PREFIX):
            continue
        path = os.path.join(root, entry)
        if temporary and not os.path.exists(os.path.join(path, MARKER)):
            continue
        try:
            found.append((path, validate(path)))
        except CheckpointError as error:
            damaged.append(error)
    if warn and found:  # if none is whole, the caller's error says why
        for passed_over in damaged:
            logger.warning("passed over %s", passed_over)
    return sorted(found, key=lambda item: (item[1].serial, item[0]))


def tidy(root: str) -> None:
    """Completes what a kill or a full disk interrupted: gives a whole temporary folder its name and removes other
    leftovers."""
    for path, _ in _whole(root):
        finish_rename(path)
    _empty_trash(root)
    for entry in _listdir(root):
        if entry.startswith(TEMPORARY):
            _remove(os.path.join(root, entry))


def _settle(path: str, ranks: RankGroup) -> dict[str, dict]:
    """Puts every file on disk. Returns the marker's `files`, of which each rank reads its share."""
    ranks.gather(None)  # all have written
    files = ranks.gather(_files(path) if ranks.rank == 0 else None)[0]
    mine = [os.path.join(path, file) for file in ranks.share(files)]
    for full in mine:
        fsync_path(full)
    with ThreadPoolExecutor(THREADS) as pool:
        entries = [
            {"size": os.path.getsize(f), "crc32": crc} for f, crc in zip(mine, pool.map(crc32_of, mine), strict=True)
        ]
    everyone = ranks.gather(dict(zip(ranks.share(files), entries, strict=True)))
    return {file: everyone[i % ranks.size][file] for i, file in enumerate(files)}


def write_marker(path: str, files: dict[str, dict], *, step: int, serial: int, backend: str) -> None:
    """Puts the folders on disk, then COMPLETE. files: the result of `_settle`."""
    for folder, _, _ in os.walk(path):
        fsync_path(folder)
    fields = {
        "format": FORMAT, "version": FORMAT_VERSION, "step": step, "serial": serial, "backend": backend,
        "mrl_version": mrl.__version__, "files": files,
    }  # fmt: skip
    _replace_file(os.path.join(path, MARKER), json.dumps(fields, indent=1).encode())


def _publish(root: str, name: str) -> None:
    """Gives the temporary folder its final name, then moves `latest`."""
    final = os.path.join(root, name)
    if os.path.lexists(final):  # the same step, saved again after a resume from an older one
        _to_trash(root, name)
    os.rename(os.path.join(root, TEMPORARY + name), final)
    fsync_path(root)
    _replace_file(os.path.join(root, LATEST), f"{name}\n".encode())
    _empty_trash(root)


def _prune(root: str, keep: int, protect: Collection[str]) -> None:
    """Deletes whole checkpoints, except the newest `keep` and those named in `protect`."""
    assert keep >= 1, f"keep {keep}"
    for path, _ in _whole(root)[:-keep]:
        if os.path.basename(path) not in protect:
            _to_trash(root, os.path.basename(path))
    _empty_trash(root)


def _to_trash(root: str, name: str) -> None:
    """Renames a checkpoint away, so that no reader takes a half deleted one for a checkpoint."""
    trash = os.path.join(root, TRASH + name)
    if os.path.lexists(trash):
        _remove(trash)
    os.rename(os.path.join(root, name), trash)


def _empty_trash(root: str) -> None:
    for entry in _listdir(root):
        if entry.startswith(TRASH):
            _remove(os.path.join(root, entry))


def _remove(path: str) -> None:
    """Removes a file or a folder; of a link only the link."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def _replace_file(path: str, content: bytes) -> None:
    """Writes a file so that readers see the old content or all of the new, also after a power cut."""
    temporary = f"{path}.tmp"
    write_synced(temporary, content)
    os.replace(temporary, path)
    fsync_path(os.path.dirname(path))


def _files(path: str) -> list[str]:
    """Returns the relative paths of all files under `path` except the marker, sorted, with forward slashes."""
    files = []
    for folder, _, names in os.walk(path):
        files += [os.path.relpath(os.path.join(folder, name), path).replace(os.sep, "/") for name in names]
    return sorted(file for file in files if file != MARKER)


def _listdir(path: str) -> list[str]:
    return sorted(os.listdir(path)) if os.path.isdir(path) else []


def _read_bytes(path: str) -> bytes | None:
    if not os.path.isfile(path):
        return None
    with open(path, "rb") as source:
        return source.read()


def check_file(path: str, file: str, entry: dict, *, content: bool) -> None:
    """Refuses a file of the checkpoint at `path` that is not as the marker says. content: read it too."""
    full = os.path.join(path, file)
    if not os.path.isfile(full):
        raise _unusable(path, f"damaged: {file} is missing")
    size = os.path.getsize(full)
    if size != entry["size"]:
        raise _unusable(path, f"damaged: {file} has {size} bytes and was saved with {entry['size']}")
    try:
        same = not content or crc32_of(full) == entry["crc32"]
    except OSError as error:
        raise _unusable(path, f"damaged: {file} cannot be read ({error})") from error
    if not same:
        raise _unusable(path, f"damaged: the content of {file} has changed")
