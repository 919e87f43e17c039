"""Checkpoints that are damaged, foreign or not there: refused by name on every rank, before anything is loaded or written.

Each case resumes a new run from a checkpoint in which one thing is wrong that only a load finds, on both engines. Tables of
the others: tests/engine/test_checkpoint.py (the folder), tests/engine/test_contract.py (another model, on every rank) and
tests/bad_input/trainer_cases.py (the command line).
"""

import functools
import pathlib
import shutil

import pytest

from mrl.engine.atomic_checkpoint import SMALL_BYTES
from tests.resume import runs
from tests.resume.cases import remark

LAYOUTS = {"megatron": runs.Layout(2, "wide", parallel={"pp": 2}), "fsdp": runs.Layout(2, "wide", "fsdp")}
STEP = "step_00000002"


@pytest.fixture(scope="module")
def stopped(inputs, tmp_path_factory):
    """Backend -> the folder of a run of four steps that was stopped after two."""

    @functools.cache
    def of(backend):
        folder = tmp_path_factory.mktemp(backend)
        runs.stop_after(config_of(inputs, folder, backend), 2, 2)
        return folder

    return of


def config_of(inputs, output_dir, backend, **changes):
    return runs.make_config(inputs, output_dir, LAYOUTS[backend], train={"steps": 4, "eval_every": None}, **changes)


def snapshot(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def shard(checkpoint):
    """The largest file of weights."""
    return max(checkpoint.rglob("*.distcp"), key=lambda path: path.stat().st_size)


def flip_in_shard(checkpoint):
    """In a file so large that only a load reads it."""
    assert shard(checkpoint).stat().st_size > SMALL_BYTES
    flip(shard(checkpoint))


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def unreadable(checkpoint):
    """A shard that holds something else and a marker that agrees: what a checksum cannot tell."""
    path = shard(checkpoint)
    path.write_bytes(bytes(path.stat().st_size))
    remark(checkpoint, path)


DAMAGES = {
    "flipped bit in a shard": (flip_in_shard, ("damaged: the content of ", ".distcp has changed")),
    "not what torch reads": (unreadable, ("cannot be read (",)),
}


@pytest.mark.parametrize("backend", LAYOUTS)
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_or_foreign_checkpoint_is_refused_by_name(inputs, stopped, tmp_path, backend, name):
    damage, says = DAMAGES[name]
    checkpoint = tmp_path / STEP
    shutil.copytree(stopped(backend) / "checkpoints" / STEP, checkpoint)
    damage(checkpoint)
    refused(
        config_of(inputs, tmp_path / "run", backend, checkpoint={"resume": str(checkpoint)}), str(checkpoint), *says
    )


def refused(config, *says):
    """One message with all the words, on every rank; no file is left."""
    ended, message, _ = runs.train(config, 2)
    assert ended in ("CheckpointError", "DamagedCheckpoint", "ConfigError"), (ended, message)
    assert all(words in message for words in says), message
    assert "\n" not in message and not list(pathlib.Path(config["output_dir"]).glob("*"))


@pytest.mark.slow
def test_auto_passes_over_a_damaged_one_and_says_so(inputs, tmp_path):
    """The newest whole one is taken, and the run that goes on from it is the same run."""
    config = config_of(inputs, tmp_path / "run", "fsdp", checkpoint={"keep": 3})
    runs.stop_after(config, 2, 3)
    flip_in_shard(runs.newest(tmp_path / "run"))
    assert f"{STEP}, after step 2" in runs.finish(config, 2)
    once = config_of(inputs, tmp_path / "once", "fsdp")
    runs.finish(once, 2)
    runs.assert_same_result(tmp_path / "run", tmp_path / "once")


def test_auto_refuses_where_every_one_is_damaged_inside(inputs, stopped, tmp_path):
    shutil.copytree(stopped("fsdp"), tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    for path in checkpoints.glob("step_*"):
        flip_in_shard(path)
    before = snapshot(tmp_path / "run")
    ended, message, _ = runs.train(config_of(inputs, tmp_path / "run", "fsdp"), 2)
    assert ended == "CheckpointError" and f"no checkpoint in {checkpoints} is whole" in message, message
    assert all(str(path) in message for path in checkpoints.glob("step_*")) and snapshot(tmp_path / "run") == before
