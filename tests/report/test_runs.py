"""What a run's directory says, and what is said of folders that are none."""

from __future__ import annotations

import pathlib

import pytest

from mrl.errors import UserError
from mrl.report.runs import flatten, is_locked, read_settings, readers
from mrl.trainers.run_lock import RunLock
from tests.report import made_runs


def refusal(*paths: object, **keys: bool) -> str:
    with pytest.raises(UserError) as refused:
        readers([str(path) for path in paths], **keys)
    return str(refused.value)


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_what_config_yaml_says(tmp_path):
    run = made_runs.make_sft(tmp_path / "a")
    settings = read_settings(run / "config.yaml")
    assert settings.versions == {"mrl": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "megatron-core": "0.16.1",
                                 "transformers": "5.23.0", "transformer-engine": "absent"}  # fmt: skip
    assert settings.header == {"git": "0123abc, clean", "command": "mrl sft a.yaml", "length": "20 steps"}
    assert settings.keys["optimizer.lr"] == 0.001 and settings.keys["optimizer.betas"] == [0.9, 0.95]
    assert settings.total_steps == 20 and settings.problem is None


def test_a_config_that_cannot_be_read_is_no_reason_to_show_nothing(tmp_path):
    run = made_runs.make_sft(tmp_path / "a")
    (run / "config.yaml").write_text("a: [")
    [reader] = readers([str(run)])
    assert "config.yaml" in reader.run().notes[-1] and reader.run().settings.total_steps is None
    (run / "config.yaml").unlink()
    assert reader.run().notes == ["config.yaml is not there: no versions, keys and length of the run"]


def test_keys_by_their_dotted_names():
    assert flatten({"a": {"b": 1, "c": {"d": [1]}, "e": {}}, "f": None}) == {
        "a.b": 1,
        "a.c.d": [1],
        "a.e": {},
        "f": None,
    }


def test_folders_that_are_no_run():
    made_runs.make_sft(pathlib.Path("runs/a"))
    says = ": has no metrics.jsonl with a step; give the output_dir of a run, as in runs/demo, or --watch"
    for name in ("runs/nothing", "runs", "runs/a/metrics.jsonl"):
        assert refusal(name).startswith(name + says)
    made_runs.make_run(pathlib.Path("b"), [])
    assert refusal("b").startswith("b" + says)
    [reader] = readers(["b"], may_be_empty=True)
    assert reader.run().progress == "step 0 of 20, not running"


def test_names_are_as_long_as_it_takes():
    for name in ("x/run", "y/run", "other"):
        made_runs.make_sft(pathlib.Path(name))
    assert [reader.name for reader in readers(["x/run"])] == ["run"]
    assert [reader.name for reader in readers(["x/run", "other"])] == ["run", "other"]
    assert [reader.name for reader in readers(["x/run", "y/run"])] == ["x/run", "y/run"]


def test_whether_it_runs(tmp_path):
    """By the lock that the trainer holds; looking at it takes nothing from a run that starts."""
    run = made_runs.make_sft(tmp_path / "a", steps=20)
    [reader] = readers([str(run)])
    assert reader.run().state == "finished" and reader.run().progress == "step 20 of 20, finished"
    lock = RunLock(run, wait_s=0)
    lock.acquire()
    assert is_locked(run / ".lock") and reader.run().state == "running"
    lock.release()
    assert reader.run().state == "finished"
    (run / ".lock").write_text("process 1 on gone")  # of a run that was killed
    assert reader.run().state == "finished"
    [half] = readers([str(made_runs.make_sft(tmp_path / "b", steps=10))])
    assert half.run().progress == "step 10 of 20, not running"


def test_another_start_is_named(tmp_path):
    run = made_runs.make_sft(tmp_path / "a")
    with open(run / "config.yaml", "a") as config:
        config.write("checkpoint: {resume: runs/old/checkpoints/step_00000003}\n")
    [reader] = readers([str(run)])
    assert reader.run().notes == ["it began from the checkpoint runs/old/checkpoints/step_00000003 (checkpoint.resume)"]
