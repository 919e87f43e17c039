"""`checkpoint.remote`: copies at a URL, the last N of them, and a run that goes on from there when nothing local is left."""

import functools
import shutil

import fsspec
import pytest

from mrl.engine import checkpoint_remote
from tests.resume import runs
from tests.tiers import in_tiers

LAYOUTS = {"fsdp": runs.Layout(2, "dense", "fsdp"), "megatron": runs.Layout(2, parallel={"tp": 2})}
STEPS = 6


def config_of(inputs, folder, name, remote):
    return runs.make_config(
        inputs, folder, LAYOUTS[name], train={"steps": STEPS, "eval_every": None}, checkpoint={"remote": remote, "keep": 2}
    )  # fmt: skip


def at(url):
    files, base = fsspec.core.url_to_fs(url)
    return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in files.ls(base, detail=False))


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    @functools.cache
    def of(name):
        folder = tmp_path_factory.mktemp("whole")
        runs.finish(config_of(inputs, folder, name, None), 2)
        return folder

    return of


@pytest.mark.parametrize(
    ("name", "scheme"),
    in_tiers([], [("fsdp", "file")], [("fsdp", "file"), ("megatron", "file"), ("megatron", "memory")]),
)
def test_goes_on_from_the_copy_when_the_local_run_is_gone(inputs, whole, tmp_path, name, scheme):
    """memory:// stands for an object store: it has no folders and no rename. It lives in the ranks, so they are asked."""
    url = f"file://{tmp_path}/remote" if scheme == "file" else f"memory://{tmp_path.name}"
    config = config_of(inputs, tmp_path / "run", name, url)
    runs.stop_after(config, 2, 4)
    if scheme == "file":
        assert at(url) == ["latest", "step_00000003", "step_00000004"]
    shutil.rmtree(tmp_path / "run")
    said = runs.finish(config, 2)
    assert "after step 4" in said
    if scheme == "file":
        assert at(url) == ["latest", "step_00000005", "step_00000006"]
    expected = runs.steps(whole(name))
    assert runs.steps(tmp_path / "run") == expected[4:], "the first lines were lost with the run; the rest is the same"
    for read, what in ((runs.sharded_tensors, "tensors"), (runs.small_state, "state")):
        runs.assert_same_state(read(runs.newest(tmp_path / "run")), read(runs.newest(whole(name))), what)
    runs.assert_same_state(runs.exported(tmp_path / "run"), runs.exported(whole(name)), "export")


@pytest.mark.slow
def test_a_copy_that_a_kill_interrupted_is_made_again(inputs, tmp_path):
    """Also of a run's last checkpoint, after which nothing is saved; and half copies do not stay for ever."""
    url = f"file://{tmp_path}/remote"
    config = config_of(inputs, tmp_path / "run", "fsdp", url)
    runs.stop_after(config, 2, 4)
    (tmp_path / "remote" / "step_00000004" / "COMPLETE").unlink()
    shutil.copytree(tmp_path / "remote" / "step_00000004", tmp_path / "remote" / "step_00000001")
    runs.finish(config, 2)
    assert at(url) == ["latest", "step_00000005", "step_00000006"]
    (tmp_path / "remote" / "step_00000006" / "COMPLETE").unlink()
    assert "is complete: 6 of 6 steps are made" in runs.finish(config, 2)
    fetched = checkpoint_remote.fetch(url, str(tmp_path / "fetched"))
    assert fetched == str(tmp_path / "fetched" / "step_00000006")
