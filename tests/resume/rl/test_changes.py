"""Config, model, layout and checkpoints that changed between save and resume."""

import json
import pathlib
import shutil

import pytest

from tests.config.test_load import merged
from tests.engine.tiny import relative_l2
from tests.resume import runs
from tests.resume.rl import rl_runs
from tests.resume.test_refused import flip, shard, snapshot


@pytest.fixture(scope="module")
def stopped(inputs, tmp_path_factory):
    """Name of a run -> its folder, stopped after step 6, with checkpoints after steps 3 and 6."""
    made = {}

    def of(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("stopped") / "run"
            config = rl_runs.make_config(inputs, folder, name, checkpoint={"keep": 3})
            ended, message, _ = rl_runs.train(config, rl_runs.RUNS[name][0], happening="signals", place="step", step=6)
            assert ended == "stopped", message
            made[name] = folder
        return made[name]

    return of


def nested(dotted, value):
    for name in reversed(dotted.split(".")):
        value = {name: value}
    return value


BREAKING = {"critic.optimizer.lr": (0.5, "0.005"), "rollout.temperature": (0.5, "1.0")}
"""Two of them; each key that may not change is in tests/config/test_resume.py."""


@pytest.mark.parametrize("key", BREAKING)
def test_a_change_that_breaks_the_run_is_refused_with_both_values(inputs, stopped, key):
    value, before = BREAKING[key]
    files = snapshot(stopped("ppo"))
    config = merged(rl_runs.make_config(inputs, stopped("ppo"), "ppo", checkpoint={"keep": 3}), nested(key, value))
    ended, message, _ = rl_runs.train(config, 2)
    shown = value if isinstance(value, str) else json.dumps(value)
    assert ended == "ConfigError" and message.startswith(f"{key}: value ") and "\n" not in message, (ended, message)
    assert shown in message and before in message, message
    assert snapshot(stopped("ppo")) == files


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"algorithm": {"name": "grpo", "kl_target": 0}, "critic": {}}, "algorithm.name"),
        ({"algorithm": {"kl_in": "none", "kl_coef": None, "kl_target": None, "kl_gain": None}}, "algorithm.kl_in"),
    ],
    ids=["no critic", "no reference"],
)
def test_another_set_of_roles_is_refused(inputs, stopped, tmp_path, change, key):
    """From a checkpoint by its name, in a run of its own; nothing is written there."""
    checkpoint = {"resume": str(runs.newest(stopped("ppo")))}
    config = merged(rl_runs.make_config(inputs, tmp_path / "new", "ppo", checkpoint=checkpoint), change)
    if not change.get("critic", True):
        del config["critic"], config["algorithm"]["kl_target"], config["algorithm"]["kl_gain"]
    ended, message, _ = rl_runs.train(config, 2)
    assert ended in ("ConfigError", "CheckpointError") and "\n" not in message, (ended, message)
    assert key in message or "role" in message, message
    assert not (tmp_path / "new").exists()


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


def damage_trainer(checkpoint):
    flip(checkpoint / "trainer.pt")


def damage_critic(checkpoint):
    flip(shard(checkpoint / "critic"))


def lose_actor(checkpoint):
    shutil.rmtree(checkpoint / "actor")


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage", [damage_trainer, *(pytest.param(d, marks=pytest.mark.nightly) for d in (damage_critic, lose_actor))]
)
def test_a_damaged_checkpoint_is_passed_over(inputs, stopped, unharmed, tmp_path, damage):
    """In whichever role the damage is: nothing of the newest is used, and the run from the one before is the same run."""
    shutil.copytree(stopped("ppo"), tmp_path / "run")
    damage(runs.newest(tmp_path / "run"))
    said = rl_runs.finish(rl_runs.make_config(inputs, tmp_path / "run", "ppo", checkpoint={"keep": 3}), 2)
    assert "step_00000003, after step 3" in said, said
    runs.assert_same_result(tmp_path / "run", unharmed("ppo"))


def test_all_damaged_is_refused(inputs, stopped, tmp_path):
    shutil.copytree(stopped("grpo"), tmp_path / "run")
    for checkpoint in (tmp_path / "run" / "checkpoints").glob("step_*"):
        damage_trainer(checkpoint)
    files = snapshot(tmp_path / "run")
    ended, message, _ = rl_runs.train(rl_runs.make_config(inputs, tmp_path / "run", "grpo", checkpoint={"keep": 3}), 1)
    assert ended == "CheckpointError" and "is whole" in message and snapshot(tmp_path / "run") == files, message


def test_the_run_of_another_command_is_refused(inputs, stopped, tmp_path):
    """`mrl sft` in this folder, and on a checkpoint of several roles."""
    sft = {
        "model": {"path": str(inputs / "plain"), "dtype": "float32"}, "seed": 3,
        "data": {"train": str(inputs / "train.jsonl"), "columns": {"answer": "completion"}, "max_length": 64},
        "engine": {"device": "cpu"}, "train": {"steps": 8, "global_batch_size": 4}, "log": {"console": "plain"},
    }  # fmt: skip
    ended, message, _ = runs.train({**sft, "output_dir": str(stopped("grpo"))}, 1)
    assert ended == "ConfigError" and message.startswith("output_dir: value ") and "`mrl ppo`" in message, message
    checkpoint = {"resume": str(runs.newest(stopped("grpo")))}
    ended, message, _ = runs.train({**sft, "output_dir": str(tmp_path / "new"), "checkpoint": checkpoint}, 1)
    assert ended in ("CheckpointError", "ConfigError") and "\n" not in message and "mrl ppo" in message, message
    assert not pathlib.Path(tmp_path / "new").exists()
