"""Checkpoints that are damaged, foreign or not there: refused by name on every rank, before anything is loaded or written.

Each case resumes a new run from one checkpoint in which one thing is wrong. The folder protocol has a table of its own
in tests/engine/test_checkpoint.py; this is what a user of `checkpoint.resume` meets, on both engines.
"""

import json
import pathlib
import shutil

import pytest

from mrl.engine.atomic_checkpoint import SMALL_BYTES
from tests.engine import tiny
from tests.resume import runs
from tests.resume.cases import remark
from tests.tiers import in_tiers, slow_but
from tests.trainers.tiny_runs import load_example

LAYOUTS = {"megatron": runs.Layout(2, "wide", parallel={"pp": 2}), "fsdp": runs.Layout(2, "wide", "fsdp")}
STEP = "step_00000002"


@pytest.fixture(scope="module")
def stopped(inputs, tmp_path_factory):
    """Backend -> the folder of a run of four steps that was stopped after two."""
    made = {}

    def of(backend):
        if backend not in made:
            config = config_of(inputs, tmp_path_factory.mktemp(backend), backend)
            runs.stop_after(config, 2, 2)
            made[backend] = pathlib.Path(config["output_dir"])
        return made[backend]

    return of


def config_of(inputs, output_dir, backend, **changes):
    return runs.make_config(inputs, output_dir, LAYOUTS[backend], train={"steps": 4, "eval_every": None}, **changes)


def snapshot(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def shard(checkpoint):
    """The largest file of weights."""
    return max(checkpoint.rglob("*.distcp"), key=lambda path: path.stat().st_size)


def small_file(checkpoint):
    return next(p for p in (checkpoint / "engine.pt", checkpoint / "state.pt") if p.exists())


def flip_in_shard(checkpoint):
    """In a file so large that only a load reads it."""
    assert shard(checkpoint).stat().st_size > SMALL_BYTES
    flip(shard(checkpoint))


def truncate(checkpoint):
    path = shard(checkpoint)
    path.write_bytes(path.read_bytes()[:-10])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def unreadable(checkpoint):
    """A shard that holds something else and a marker that agrees: what a checksum cannot tell."""
    path = shard(checkpoint)
    path.write_bytes(bytes(path.stat().st_size))
    remark(checkpoint, path)


def edit_marker(checkpoint, **fields):
    path = checkpoint / "COMPLETE"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


DAMAGES = {
    "truncated shard": (truncate, ("damaged: ", ".distcp has ", "was saved with")),
    "flipped bit in a shard": (flip_in_shard, ("damaged: the content of ", ".distcp has changed")),
    "flipped bit in a small file": (lambda c: flip(small_file(c)), ("damaged: the content of ", ".pt has changed")),
    "missing shard": (lambda c: shard(c).unlink(), ("damaged: ", ".distcp is missing")),
    "missing rng": (lambda c: next(c.rglob("*rank_00001.pt"), c / "rng_1.pt").unlink(), ("damaged: rng", "is missing")),
    "missing marker": (lambda c: (c / "COMPLETE").unlink(), ("no whole checkpoint",)),
    "marker of another format": (lambda c: edit_marker(c, format="other"), ("foreign: COMPLETE",)),
    "marker cut short": (lambda c: (c / "COMPLETE").write_text('{"format": "mrl-'), ("COMPLETE cannot be read",)),
    "newer format": (lambda c: edit_marker(c, version=3, mrl_version="9.0"), ("format 3 (mrl 9.0)", "reads format 2")),
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


@pytest.mark.parametrize(("saved_by", "read_by"), [("fsdp", "megatron"), ("megatron", "fsdp")])
def test_the_other_engine_is_named(inputs, stopped, tmp_path, saved_by, read_by):
    checkpoint = str(stopped(saved_by) / "checkpoints" / STEP)
    config = config_of(inputs, tmp_path / "run", read_by, checkpoint={"resume": checkpoint})
    refused(config, checkpoint, f"saved by the {saved_by} engine", f"set engine.backend to {saved_by}")


@pytest.mark.parametrize("backend", LAYOUTS)
@pytest.mark.parametrize(("fields", "says"), [({"hidden_size": 64}, "64"), ({"layers": 3}, "layers")])
def test_another_architecture_is_named(inputs, stopped, tmp_path, backend, fields, says):
    model = tmp_path / "model"
    tiny.make_model(str(model), "qwen3", tied=True, **fields)
    load_example("arithmetic/make_data.py").make_tokenizer().save_pretrained(model)
    checkpoint = str(stopped(backend) / "checkpoints" / STEP)
    config = config_of(inputs, tmp_path / "run", backend, checkpoint={"resume": checkpoint}, model={"path": str(model)})
    refused(config, checkpoint, "is of another model: ", says)


def refused(config, *says):
    """One message with all the words, on every rank; no folder, no metrics, nothing."""
    ended, message, _ = runs.train(config, 2)
    assert ended in ("CheckpointError", "DamagedCheckpoint", "ConfigError"), (ended, message)
    assert all(words in message for words in says), message
    assert "\n" not in message and not pathlib.Path(config["output_dir"]).exists()


def test_latest_that_points_nowhere_is_not_read(inputs, stopped, tmp_path):
    """`latest` is for people: auto looks at the checkpoints themselves, and the next save puts it right."""
    shutil.copytree(stopped("megatron"), tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "latest").write_text("step_00000099\n")
    said = runs.finish(config_of(inputs, tmp_path / "run", "megatron"), 2)
    assert f"resuming from {tmp_path / 'run' / 'checkpoints' / STEP}, after step 2" in said
    assert runs.newest(tmp_path / "run").name == "step_00000004"


@pytest.mark.parametrize("damage", slow_but([flip_in_shard], [truncate, flip_in_shard]))
def test_auto_passes_over_a_damaged_one_and_says_so(inputs, stopped, tmp_path, damage):
    """The newest whole one is taken, and the run that goes on from it is the same run."""
    config = config_of(inputs, tmp_path / "run", "fsdp", checkpoint={"keep": 3})
    runs.stop_after(config, 2, 3)
    damage(runs.newest(tmp_path / "run"))
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


def truncate_all(checkpoint):
    for each in checkpoint.parent.glob("step_*"):
        truncate(each)


CLI = {
    "truncated shard": (truncate, "checkpoint.resume={checkpoint}", ("damaged: ", ".distcp has ", "use another")),
    "no such folder": (
        lambda c: None,
        "checkpoint.resume={checkpoint}9",
        ("checkpoint.resume: value ", "is no folder"),
    ),
    "latest itself": (lambda c: None, "checkpoint.resume={latest}", ("checkpoint.resume: value ", "is no folder")),
    "all damaged": (truncate_all, "checkpoint.resume=auto", ("damaged: ", "is whole")),
    "breaking change": (lambda c: None, "optimizer.lr=0.5", ("optimizer.lr: value 0.5 is not the 0.005",)),
}


@pytest.mark.parametrize("name", in_tiers([], ["truncated shard"], CLI))
def test_exit_code_2_and_one_line(inputs, stopped, tmp_path, name):
    damage, override, says = CLI[name]
    run = runs.new_run(tmp_path, inputs, LAYOUTS["megatron"])
    run.config = config_of(inputs, run.output, "megatron")
    source = run.output if "truncated" not in name else tmp_path / "other"
    shutil.copytree(stopped("megatron"), source)
    checkpoint, latest = source / "checkpoints" / STEP, source / "checkpoints" / "latest"
    damage(checkpoint)
    before = snapshot(source)
    code, out, err = run.finish(run.start(override.format(checkpoint=checkpoint, latest=latest)))
    assert code == 2, f"exit code {code}\n{out}\n{err}"
    assert all(words in err for words in says) and "Traceback" not in out + err, err
    assert err.count("mrl: ") == 1 and err.splitlines()[-1].startswith("mrl: "), err
    shutil.rmtree(run.output / "logs", ignore_errors=True)
    assert snapshot(source) == before
