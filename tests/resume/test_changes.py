"""Config changes between save and resume: what breaks the run is refused with both values, the rest is said and works."""

import json
import pathlib
import shutil

import pytest

from mrl.config.load import from_dict
from mrl.engine.schedule import learning_rate
from tests.resume import runs

LAYOUT = runs.Layout(1, "plain")


@pytest.fixture(scope="module")
def stopped(inputs, tmp_path_factory):
    """A run of twelve steps that was stopped after four; the rows are in a folder of its own."""
    folder = tmp_path_factory.mktemp("stopped")
    runs.stop_after(config_of(inputs, folder / "run"), 1, 4)
    return folder / "run"


@pytest.fixture
def copy(stopped, tmp_path):
    shutil.copytree(stopped, tmp_path / "run")
    return tmp_path / "run"


def config_of(inputs, output_dir, **changes):
    return runs.make_config(inputs, output_dir, LAYOUT, **changes)


BREAKING = {
    "seed": (8, "7"),
    "model.dtype": ("bfloat16", '"float32"'),
    "engine.backend": ("fsdp", '"megatron"'),
    "optimizer.lr": (0.01, "0.005"),
    "optimizer.betas": ([0.9, 0.99], "[0.9, 0.95]"),
    "optimizer.schedule": ("linear", '"cosine"'),
    "optimizer.warmup_steps": (2, "3"),
    "optimizer.clip_grad": (0.5, "1.0"),
    "data.max_length": (30, "32"),
    "data.packing": (False, "true"),
    "data.shuffle": (False, "true"),
    "train.global_batch_size": (5, "4"),
}


@pytest.mark.parametrize("key", BREAKING)
def test_a_change_that_breaks_the_run_is_refused_with_both_values(inputs, stopped, tmp_path, key):
    """Auto and an explicit checkpoint alike; the run's directory stays as it was."""
    value, before = BREAKING[key]
    section, _, name = key.rpartition(".")
    change = {section: {name: value}} if section else {name: value}
    files = sorted(p.as_posix() for p in stopped.rglob("*"))
    for output, resume in ((stopped, "auto"), (tmp_path / "new", str(runs.newest(stopped)))):
        config = config_of(inputs, output, checkpoint={"resume": resume}, **change)
        ended, message, _ = runs.train(config, 1)
        assert ended in ("ConfigError", "CheckpointError"), (ended, message)
        shown = [value if isinstance(value, str) else json.dumps(value), before.strip('"')]
        assert name in message and all(words in message for words in shown), message
    assert sorted(p.as_posix() for p in stopped.rglob("*")) == files and not (tmp_path / "new").exists()


def test_other_changes_are_said_with_both_values_and_work(inputs, copy):
    config = config_of(
        inputs, copy, engine={"recompute": "full", "micro_batch": {"size": 1}}, train={"eval_every": 4}, checkpoint={"keep": 3}
    )  # fmt: skip
    said = runs.finish(config, 1)
    for note in (
        'engine.recompute: "none" at the save, "full" now', "engine.micro_batch.size: 2 at the save, 1 now",
        "train.eval_every: 5 at the save, 4 now", "checkpoint.keep: 2 at the save, 3 now", "output_dir: ",
    ):  # fmt: skip
        assert f"changed since the checkpoint: {note}" in said, said
    assert said.count("changed since the checkpoint") == 5
    assert len(runs.updates(copy)) == runs.STEPS
    assert "\n# layer_spec: local\n" in (copy / "config.yaml").read_text()


def test_trap_23_a_longer_run_follows_the_schedule_of_its_new_length(inputs, copy):
    """Rates before the change stay as they were made; those after are the new schedule's at the same step."""
    longer = config_of(inputs, copy, train={"steps": 16})
    said = runs.finish(longer, 1)
    assert "train.steps: 12 at the save, 16 now (the learning-rate schedule follows the new length)" in said
    optimizer = from_dict(longer).optimizer
    expected = [learning_rate(i, optimizer=optimizer, total_steps=12 if i < 4 else 16) for i in range(16)]
    assert [row["train/lr"] for row in runs.updates(copy)] == expected


def test_a_finished_run_extended_is_the_longer_run(inputs, tmp_path):
    """With a constant rate, bit by bit; the old export gives way to the new one."""
    constant = {"schedule": "constant"}
    short = config_of(inputs, tmp_path / "run", train={"steps": 3, "eval_every": None}, optimizer=constant)
    runs.finish(short, 1)
    long = config_of(inputs, tmp_path / "run", train={"steps": 6, "eval_every": None}, optimizer=constant)
    runs.finish(long, 1)
    once = config_of(inputs, tmp_path / "once", train={"steps": 6, "eval_every": None}, optimizer=constant)
    runs.finish(once, 1)
    last = [row for row in runs.steps(tmp_path / "run") if row["step"] != 3]  # evaluated at its first end too
    assert last == [row for row in runs.steps(tmp_path / "once") if row["step"] != 3]
    ours, theirs = runs.exported(tmp_path / "run"), runs.exported(tmp_path / "once")
    runs.assert_same_state(ours, theirs, "export")


@pytest.mark.parametrize(
    ("edit", "says"),
    [(lambda rows: [*rows, rows[0]], "has 27 rows and had 26"), (lambda rows: [rows[0], *rows[:-1]], "when the checkpoint was saved")],
    ids=["a row more", "other rows"],
)  # fmt: skip
def test_trap_32_other_data_under_an_old_position_is_refused(inputs, tmp_path, edit, says):
    data = tmp_path / "rows.jsonl"
    lines = pathlib.Path(inputs, "train.jsonl").read_text().splitlines(keepends=True)
    data.write_text("".join(lines))
    config = config_of(inputs, tmp_path / "run", data={"train": str(data)})
    runs.stop_after(config, 1, 3)
    data.write_text("".join(edit(lines)))
    ended, message, _ = runs.train(config, 1)
    assert ended == "CheckpointError" and message.startswith(f"data.train: {data} has ") and says in message, message
    assert len(runs.updates(tmp_path / "run")) == 3
