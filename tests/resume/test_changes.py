"""Config changes between save and resume: what breaks the run is refused with both values, the rest is said and works."""

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


BREAKING = {"engine.backend": ("fsdp", ("fsdp", "megatron")), "optimizer.betas": ([0.9, 0.99], ("0.99", "0.95"))}
"""Two of them; each key that may not change is in tests/config/test_resume.py."""


@pytest.mark.parametrize("key", BREAKING)
def test_a_change_that_breaks_the_run_is_refused_with_both_values(inputs, stopped, tmp_path, key):
    """Auto and an explicit checkpoint alike; the run's directory stays as it was."""
    value, shown = BREAKING[key]
    section, _, name = key.rpartition(".")
    change = {section: {name: value}} if section else {name: value}
    files = sorted(p.as_posix() for p in stopped.rglob("*"))
    for output, resume in ((stopped, "auto"), (tmp_path / "new", str(runs.newest(stopped)))):
        config = config_of(inputs, output, checkpoint={"resume": resume}, **change)
        ended, message, _ = runs.train(config, 1)
        assert ended in ("ConfigError", "CheckpointError"), (ended, message)
        assert name in message and all(words in message for words in shown), message
    assert sorted(p.as_posix() for p in stopped.rglob("*")) == files and not list((tmp_path / "new").glob("*"))


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
    assert "train.steps: 12 at the save, 16 now (a schedule that decays follows the new length)" in said
    optimizer = from_dict(longer).optimizer
    expected = [learning_rate(i, optimizer=optimizer, total_steps=12 if i < 4 else 16) for i in range(16)]
    assert [row["train/lr"] for row in runs.updates(copy)] == expected
