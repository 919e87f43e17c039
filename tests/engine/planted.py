"""What the ranks of test_planted.py do: a checkpoint in which a file is a pickle that makes a folder, loaded.

The marker agrees with each file, as whoever gives a checkpoint away can make it.
"""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from mrl.config.schema import RoleConfig
from mrl.engine.base import BaseEngine
from mrl.engine.collective import all_ranks
from mrl.errors import CheckpointError
from mrl.roles.dispatch import TRAINER, WorkerDispatch
from tests.engine.contract import assert_equal, make_engine, train
from tests.resume.cases import remark


class Evil:
    """Its pickle makes a folder."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def forms(evil: Evil) -> dict[str, bytes]:
    """Name -> the bytes of a file: a bare pickle by each protocol, and what each format of torch.save makes of it."""
    saved, legacy = io.BytesIO(), io.BytesIO()
    torch.save({"state": evil}, saved)
    torch.save({"state": evil}, legacy, _use_new_zipfile_serialization=False)
    return {f"pickle {p}": pickle.dumps(evil, p) for p in (2, 4)} | {
        "torch": saved.getvalue(), "legacy torch": legacy.getvalue(),
    }  # fmt: skip


def plant_object(metadata: pathlib.Path, evil: Evil) -> list[pathlib.Path]:
    """Makes `.metadata` say that every tensor is an object, which torch's own planner unpickles. Returns the files."""
    found = pickle.loads(metadata.read_bytes())
    data = metadata.with_name("__9_9.distcp")
    data.write_bytes(pickle.dumps(evil, 2))
    for key in found.state_dict_metadata:
        found.state_dict_metadata[key] = BytesStorageMetadata()
        found.storage_data[MetadataIndex(key)] = _StorageInfo(data.name, 0, data.stat().st_size)
    metadata.write_bytes(pickle.dumps(found))
    return [metadata, data]


def cases(saved: pathlib.Path, copy: pathlib.Path, evil: Evil) -> Iterator[tuple[str, str]]:
    """Yields the name of a file in `saved` and what was planted in it, for as long as `copy` is that checkpoint."""
    for file in sorted(path for path in saved.rglob("*") if path.is_file() and path.name != "COMPLETE"):
        plants: dict[str, Callable[[pathlib.Path], list[pathlib.Path]]] = {
            form: lambda path, content=content: [path] if path.write_bytes(content) else []
            for form, content in forms(evil).items()
        }
        if file.name == ".metadata":
            plants["object"] = lambda path: plant_object(path, evil)
        for form, plant in plants.items():
            shutil.copytree(saved, copy)
            for changed in plant(copy / file.relative_to(saved)):
                remark(copy, changed)
            yield file.relative_to(saved).as_posix(), form
            shutil.rmtree(copy)


def loads_no_code(config: RoleConfig, folder: str) -> set[str]:
    """Loads every such checkpoint, of an engine and of roles. Returns the files that no load reads.

    A load is refused in one line, and nothing is changed; of files that are not read nothing comes.
    """
    root = pathlib.Path(folder)
    engine = make_engine(config)
    train(engine, 1)
    own = pathlib.Path(engine.save_checkpoint(str(root / "own"), global_step=1, max_ckpt_to_keep=1, state={"a": 1}))
    dispatch = WorkerDispatch({"actor": engine}, offload_idle=False)
    roles = dispatch.save_checkpoint(str(root / "roles"), global_step=1, state={"a": 1}, keep=1)
    evil, copy = Evil(root / "ran"), root / "copy"
    read: dict[str, bool] = {}
    for file, form in cases(own, copy, evil):
        refused = _refuses(engine, lambda: engine.load_checkpoint(str(copy)), f"{file}, {form}")
        read[file] = read.get(file, False) or refused
        assert not evil.path.exists(), f"{file}, {form}: code ran"
    for file, form in cases(pathlib.Path(roles), copy, evil):
        if file != TRAINER and form != "pickle 2":
            continue
        refused = _refuses(engine, lambda: dispatch.load_checkpoint(str(copy)), f"roles: {file}, {form}")
        read[file] = read.get(file, False) or refused
        assert not evil.path.exists(), f"roles: {file}, {form}: code ran"
    return {file for file, refused in read.items() if not refused}


def refuses_on_all_ranks(config: RoleConfig, folder: str) -> list[str]:
    """Returns what each rank says of a checkpoint in which the file of the last rank's generators alone is damaged."""
    root, ranks = pathlib.Path(folder), all_ranks()
    engine = make_engine(config)
    train(engine, 1)
    own = pathlib.Path(engine.save_checkpoint(str(root / "own"), global_step=1, max_ckpt_to_keep=1, state={"a": 1}))
    if ranks.rank == 0:
        of_rank = sorted(path for path in own.rglob("*.pt") if path.name.startswith(("rng_", "rank_")))[-1]
        of_rank.write_bytes(b"x")
        remark(own, of_rank)
    ranks.gather(None)
    try:
        engine.load_checkpoint(str(own))
        said = ""
    except CheckpointError as error:
        said = str(error)
    return list(ranks.gather(said))


def _refuses(engine: BaseEngine, load: Callable[[], Any], what: str) -> bool:
    before = {name: t.clone() for name, t in engine.hf_weights()}
    try:
        load()
    except CheckpointError as error:
        assert "\n" not in str(error) and "weights_only" not in str(error), error
        assert_equal(dict(engine.hf_weights()), before)
        return True
    except Exception as error:
        raise AssertionError(f"{what}: {error!r}") from error
    return False
