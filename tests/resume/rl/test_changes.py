"""Config, model, layout and checkpoints that changed between save and resume."""

import functools
import shutil

import pytest

from tests.config.test_load import merged
from tests.engine.tiny import relative_l2
from tests.resume import runs
from tests.resume.rl import rl_runs
from tests.resume.test_refused import flip, shard


@pytest.fixture(scope="module")
def stopped(inputs, tmp_path_factory):
    """Name of a run -> its folder, stopped after step 6, with checkpoints after steps 3 and 6."""

    @functools.cache
    def of(name):
        folder = tmp_path_factory.mktemp("stopped") / "run"
        config = rl_runs.make_config(inputs, folder, name, checkpoint={"keep": 3})
        ended, message, _ = rl_runs.train(config, rl_runs.RUNS[name][0], happening="signals", place="step", step=6)
        assert ended == "stopped", message
        return folder

    return of


@pytest.mark.slow
def test_a_model_and_rows_that_moved_are_the_same_run(inputs, stopped, unharmed, tmp_path):
    """The reference's too, which the actor's path stands for; other weights under the new path are refused."""
    shutil.copytree(stopped("grpo"), tmp_path / "run")
    shutil.copytree(inputs / "dropout", tmp_path / "moved")
    shutil.copy(inputs / "train.jsonl", tmp_path / "moved.jsonl")
    moved = {"actor": {"model": {"path": str(tmp_path / "moved")}}, "data": {"train": str(tmp_path / "moved.jsonl")}}
    config = merged(rl_runs.make_config(inputs, tmp_path / "run", "grpo", checkpoint={"keep": 3}), moved)
    other = merged(config, {"actor": {"model": {"path": str(inputs / "plain")}}})
    ended, message, _ = rl_runs.train(other, 1)
    assert (
        ended == "CheckpointError"
        and "/actor: is of another model: attention_dropout 0.1 there and 0.0 here" in message
    )
    said = rl_runs.finish(config, 1)
    assert "changed since the checkpoint: actor.model.path: " in said and "data.train: " in said
    assert runs.steps(tmp_path / "run") == runs.steps(unharmed("grpo"))
    runs.assert_same_state(runs.exported(tmp_path / "run"), runs.exported(unharmed("grpo")), "export")


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param({"actor": {"engine": {"parallel": {"tp": 1, "pp": 2}}}}, marks=pytest.mark.nightly),
        pytest.param(
            {"actor": {"engine": {"micro_batch": {"size": 1}, "parallel": {"tp": 1}}}}, marks=pytest.mark.nightly
        ),
        pytest.param(1, marks=pytest.mark.slow),
    ],
    ids=["tp2 to pp2", "tp2 to dp2", "two processes to one"],
)
def test_goes_on_in_another_layout(inputs, stopped, unharmed, tmp_path, layouts):
    """From the middle of an iteration. Rollouts do not change; a layout moves fp32 sums by rounding only, so metrics agree
    within 1e-4 and weights, two AdamW steps with eps 1e-6 later, within 1e-4 relative."""
    shutil.copytree(stopped("ppo"), tmp_path / "run")
    world, change = (layouts, {"actor": {"engine": {"parallel": {"tp": 1}}}}) if layouts == 1 else (2, layouts)
    said = rl_runs.finish(merged(rl_runs.make_config(inputs, tmp_path / "run", "ppo"), change), world)
    assert (
        "after step 6" in said
        and "changed since the checkpoint: actor.engine.parallel.tp: 2 at the save, 1 now" in said
    )
    for ours, theirs in zip(runs.steps(tmp_path / "run"), runs.steps(unharmed("ppo")), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5), ours["step"]
    weights = runs.exported(unharmed("ppo"))
    for name, tensor in runs.exported(tmp_path / "run").items():
        assert relative_l2(tensor, weights[name]) < 1e-4, name


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over(inputs, stopped, unharmed, tmp_path):
    """In one role of it: nothing of the newest is used, and the run from the one before is the same run."""
    shutil.copytree(stopped("ppo"), tmp_path / "run")
    flip(shard(runs.newest(tmp_path / "run") / "critic"))
    said = rl_runs.finish(rl_runs.make_config(inputs, tmp_path / "run", "ppo", checkpoint={"keep": 3}), 2)
    assert "step_00000003, after step 3" in said, said
    runs.assert_same_result(tmp_path / "run", unharmed("ppo"))
