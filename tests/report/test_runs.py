"""What a run's directory says, and what is said of folders that are none."""

from __future__ import annotations

import os
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
    for name in ("runs/a", "runs/b", "runs/c", "runs/d", "runs/e"):
        made_runs.make_sft(pathlib.Path(name))
    assert (
        refusal("runs/nothing")
        == "runs/nothing: there is no such folder; give the output_dir of a run, as in runs/demo"
    )
    assert refusal("runs") == "runs: is no run; 5 runs are in it; give runs/a runs/b runs/c runs/d (and 1 more)"
    os.makedirs("model")
    pathlib.Path("model/config.json").write_text("{}")
    assert refusal("model") == "model: is a folder of a model; give the output_dir of a run, which has metrics.jsonl"
    os.makedirs("runs/a/hf")
    pathlib.Path("runs/a/hf/config.json").write_text("{}")
    above = f"of the run in {os.path.realpath('runs/a')}; give runs/a"
    assert refusal("runs/a/hf") == f"runs/a/hf: is a folder {above}"
    assert refusal("runs/a/metrics.jsonl") == f"runs/a/metrics.jsonl: is a file {above}"
    os.makedirs("empty")
    assert refusal("empty") == "empty: has no metrics.jsonl; give the output_dir of a run, as in runs/demo"
    assert refusal("model/config.json").startswith("model/config.json: is a file; give the output_dir of a run")
    assert refusal("runs/a", "runs/b", "runs/../runs/a") == "runs/a: is named twice; name each run once"


def test_paths_and_files_that_cannot_be_looked_at():
    assert "is no path that can be looked at (File name too long); give the output_dir" in refusal("x" * 300)
    run = made_runs.make_sft(pathlib.Path("a"))
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    assert refusal("a") == "a/metrics.jsonl: cannot be read (Is a directory); make it a file that you may read"


def test_runs_without_a_step():
    run = made_runs.make_run(pathlib.Path("a"), [])
    assert refusal("a") == "a: metrics.jsonl has no step yet; wait for its first step, or give --watch"
    (run / "metrics.jsonl").write_text("<html>\n")
    assert refusal("a").startswith("a: no line of metrics.jsonl is a row of metrics (an object with a step)")
    (run / "metrics.jsonl").unlink()
    assert refusal("a") == "a: has no metrics.jsonl: that run has made no step; wait for one, or give --watch"
    [reader] = readers(["a"], may_be_empty=True)
    assert not reader.rows and reader.run().progress == "step 0 of 20, not running"


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


def test_other_starts_where_the_files_say_so(tmp_path):
    rows = [
        (step, made_runs.sft_row(step) | {"perf/memory_gb": gb}) for step, gb in enumerate([2, 3, 3, 1, 2, 2.5, 2], 4)
    ]
    run = made_runs.make_run(tmp_path / "a", rows)
    with open(run / "config.yaml", "a") as config:
        config.write("checkpoint: {resume: runs/old/checkpoints/step_00000003}\n")
    [reader] = readers([str(run)])
    assert reader.run().notes == [
        "it began from the checkpoint runs/old/checkpoints/step_00000003 (checkpoint.resume)",
        "metrics.jsonl begins with step 4: the run went on here from a checkpoint",
        "started again before step 7, 10 (seen by the peak memory, which begins anew with a process)",
    ]
