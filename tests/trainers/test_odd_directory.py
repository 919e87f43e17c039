"""A run directory with files that mrl did not write so: links are followed, odd lines and leftovers passed over."""

import errno
import json
import os

import pytest

from mrl import metrics
from mrl.config.load import from_dict
from mrl.engine import atomic_checkpoint
from mrl.errors import CheckpointError, ConfigError
from mrl.trainers.run_directory import RunDirectory, choose_start
from tests.engine.test_checkpoint import save
from tests.trainers.tiny_runs import make_config


def start(tmp_path):
    config = make_config(tmp_path, tmp_path / "run")
    return choose_start(RunDirectory(tmp_path / "run"), from_dict(config))


def test_what_a_full_disk_left_of_a_checkpoint_makes_room_for_the_config(tmp_path, monkeypatch):
    run, config = RunDirectory(tmp_path / "run"), from_dict(make_config(tmp_path, tmp_path / "run"))
    half = run.checkpoints / ".tmp-step_00000001"
    half.mkdir(parents=True)
    (half / "weights").write_text("x")
    save(run.checkpoints, 2)
    half.mkdir()
    run.prepare(config, "mrl sft")
    assert [path.name for path in run.checkpoints.iterdir() if path.is_dir()] == ["step_00000002"]

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("mrl.trainers.run_directory.write_text", full)
    with pytest.raises(ConfigError, match=r"config.yaml.tmp: No space left on device\); make room, or give another"):
        run.prepare(config, "mrl sft")


def test_checkpoints_and_export_may_be_elsewhere(tmp_path):
    run = RunDirectory(tmp_path / "run")
    for name in ("checkpoints", "hf"):
        (tmp_path / "scratch" / name).mkdir(parents=True)
        run.path.mkdir(exist_ok=True)
        (run.path / name).symlink_to(tmp_path / "scratch" / name)
    save(run.checkpoints, 1), save(run.checkpoints, 2, keep=1)
    assert start(tmp_path).step == 2
    for text in ("first", "second"):
        run.partial_hf.mkdir()
        (run.partial_hf / "config.json").write_text(text)
        run.publish_export()
        assert run.hf.is_symlink() and (run.hf / "config.json").read_text() == text
    run.forget_export()
    assert not (tmp_path / "scratch" / "hf").exists() and (run.path / "hf").is_symlink()


DEEP = "[" * 100_000
ODD_LINES = ("null", '{"loss": 1}', '{"step": []}', DEEP, "{", "")


@pytest.mark.parametrize("odd", ODD_LINES)
def test_odd_lines_of_metrics_are_passed_over(tmp_path, odd):
    path, elsewhere = tmp_path / "metrics.jsonl", tmp_path / "elsewhere.jsonl"
    rows = [json.dumps({"step": step, "loss": 1.0}) for step in (1, 2, 3)]
    elsewhere.write_text("\n".join([rows[0], odd, rows[1], rows[2], odd]) + "\n")
    path.symlink_to(elsewhere)
    metrics.rewind(path, 2)
    assert [row["step"] for row in metrics.read(path)] == [1, 2] and path.is_symlink()
    path.write_text(odd)
    assert metrics.last_line(path) is None


@pytest.mark.parametrize("name", ["/etc/passwd", "a/../../b"])
def test_a_marker_names_no_file_outside(tmp_path, name):
    """Its files are copied under their names where a checkpoint is fetched from a URL."""
    path = save(tmp_path, 1)
    marker = tmp_path / "step_00000001/COMPLETE"
    fields = json.loads(marker.read_text())
    marker.write_text(json.dumps(fields | {"files": {name: {"size": 0, "crc32": 0}}}))
    with pytest.raises(CheckpointError, match="foreign: COMPLETE"):
        atomic_checkpoint.validate(path)


@pytest.mark.parametrize("name", ["", "/COMPLETE"])
def test_a_checkpoint_that_a_user_may_not_read_is_named(tmp_path, monkeypatch, name):
    """Else the older one would be gone on from."""
    run = RunDirectory(tmp_path / "run")
    save(run.checkpoints, 1), save(run.checkpoints, 2)
    barred = f"{run.checkpoints}/step_00000002{name}"
    monkeypatch.setattr(os, "access", lambda path, mode: os.fspath(path) != barred)
    with pytest.raises(ConfigError, match=f"run' has checkpoints/step_00000002{name} that this user may not read"):
        start(tmp_path)
