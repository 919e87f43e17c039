"""No file of a checkpoint runs code: a pickle in every file of every engine's, and calls of mrl that would run one.

The marker agrees with each file, as whoever gives a checkpoint away can make it.
"""

from __future__ import annotations

import ast
import io
import os
import pathlib
import pickle
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from mrl.config.schema import LoraConfig, RoleConfig
from mrl.engine.base import BaseEngine
from mrl.engine.collective import all_ranks
from mrl.errors import CheckpointError
from mrl.roles.dispatch import TRAINER, WorkerDispatch
from tests.engine.contract import assert_equal, make_engine, train
from tests.engine.harness import run_case
from tests.engine.layouts import world_and_role
from tests.resume.cases import remark
from tests.test_floors import FILES, PACKAGE
from tests.tiers import slow_but


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


NOT_READ = {"common.pt", "metadata.json"}  # megatron's own notes


@pytest.mark.parametrize(("layout", "lora"), [("fsdp", None), ("megatron", LoraConfig(rank=2)), ("external", None)])
def test_no_file_of_a_checkpoint_runs_code(folder, tmp_path, layout, lora):
    world, config = world_and_role(layout, folder("llama"), model={"lora": lora})
    unread = run_case(world, "tests.engine.test_planted:loads_no_code", config=config, folder=str(tmp_path))
    names = {pathlib.PurePath(file).name for file in unread}
    assert names <= NOT_READ | {name for name in names if name.endswith("_1.distcp")}, unread  # of no tensor


@pytest.mark.parametrize("layout", slow_but(["fsdp dp2"], ["fsdp dp2", "megatron dp2"]))
def test_a_file_of_one_rank_that_is_refused_is_refused_on_all(folder, tmp_path, layout):
    world, config = world_and_role(layout, folder("llama"))
    said = run_case(world, "tests.engine.test_planted:refuses_on_all_ranks", config=config, folder=str(tmp_path))
    assert world == 2 and len(set(said)) == 1 and "1.pt: cannot be read" in said[0], said


PLACES = {
    "weights/pt_file.py": {"torch.load"},  # the one for all others, with weights_only
    "config/yaml_text.py": {"yaml.load"},  # with a subclass of the safe loader
    "check/measure.py": {"torch.load", "weights_only=False"},  # of a folder that `mrl check` made itself
    "check/run.py": {"torch.load", "weights_only=False"},
}
RUN_CODE = {
    "torch.load", "pickle.load", "pickle.loads", "pickle.Unpickler", "dcp.load", "dcp.state_dict_loader",
    "dcp.load_state_dict", "FileSystemReader", "dcp.FileSystemReader", "joblib.load", "marshal.load", "marshal.loads",
    "shelve.open", "dill.load", "cloudpickle.load", "pd.read_pickle", "dist_checkpointing.load", "jit.load",
    "torch.jit.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load",
}  # fmt: skip


def calls_that_may_run_code(tree):
    """Names of RUN_CODE that a module calls, and arguments that allow it to."""
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in RUN_CODE or name.rpartition(".")[2] in ("FileSystemReader", "read_pickle"):
            found.add(name)
        found |= {f"{k.arg}=False" for k in node.keywords if k.arg == "weights_only" and ast.unparse(k.value) != "True"}
        found |= {
            "allow_pickle" for k in node.keywords if k.arg == "allow_pickle" and name.startswith(("np.", "numpy."))
        }
    return found


def test_what_may_run_code_is_called_in_known_places_alone():
    found = {}
    for path in FILES:
        if names := calls_that_may_run_code(ast.parse(path.read_text(encoding="utf-8"))):
            found[path.relative_to(PACKAGE).as_posix()] = names
    assert found == PLACES
