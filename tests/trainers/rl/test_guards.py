"""The checks of the first iteration (train.guards): each fails where what it watches is broken for real, and only there.

What is broken is broken in the program (tests/trainers/rl/cases.py), never the check. A failed check stops the run with one
line before anything is trained on what is wrong, names what differs, and leaves a directory that a run can start in again.
"""

import json
import re
import shutil

import pytest

from tests.engine.harness import run_case
from tests.tiers import nightly_but
from tests.trainers.rl import tiny_policies
from tests.trainers.rl.tiny_policies import engine


def train(config, world=1, **kwargs):
    return run_case(world, "tests.trainers.rl.cases:train", config=config, **kwargs)


def fails(config, world=1, **kwargs):
    """The message of a run that is stopped, in one line, before its first step is logged."""
    ended, message, _ = train(config, world, **kwargs)
    assert (ended, message.count("\n")) == ("TrainingError", 0), (ended, message)
    return message


# -- the first rollout -----------------------------------------------------------------------------------------------------


def test_trap_19_a_sampler_with_another_temperature(inputs, tmp_path):
    """Such a run starts again."""
    config = tiny_policies.make_config(inputs, tmp_path / "run", actor={"engine": engine("megatron", tp=2)})
    off, log = {"happening": "sampler_is_off", "temperature": 0.9}, tmp_path / "run" / "metrics.jsonl"
    message = fails(config, 2, **off)
    pattern = r"the first rollout's log-probs differ from the trainer's in the mean by 0\.\d+ nats \(1e-05 is allowed\)\. The "
    assert re.match(pattern, message)
    assert message.endswith("report this, or set train.guards to false to go on")
    assert not log.exists() or tiny_policies.metrics_of(tmp_path / "run") == []
    assert train(config, 2)[0] == "done"
    assert tiny_policies.metrics_of(tmp_path / "run")[0]["rollout/logprob_gap_max"] < 1e-5


@pytest.mark.parametrize(
    "name, reference", [("ppo", None), ("grpo", engine(size=2))], ids=["the actor's layout", "another layout"]
)
def test_a_reference_with_other_weights_under_the_same_path(inputs, tmp_path, name, reference):
    allowed = "0 is allowed" if reference is None else "1e-05 is allowed"
    actor = {"engine": engine("megatron")}
    config = tiny_policies.make_config(inputs, tmp_path / "run", name, actor=actor, reference={"engine": reference})
    message = fails(config, happening="role_has_other_weights", role="reference", folder=str(inputs / "other"))
    assert message.startswith("the reference's log-probs differ from the actor's by ") and allowed in message


@pytest.mark.parametrize("broken", [False, True])
def test_beside_a_reference_with_the_actors_weights_other_teachers_may_differ(inputs, tmp_path, broken):
    """The reference's own rows are still compared."""
    _, file = tiny_policies.rows_of_two(inputs, tmp_path, 2)
    config = tiny_policies.make_config(
        inputs, tmp_path / "run", "opd", data={"train": file}, train={"steps": 1},
        algorithm={"mini_batch_size": tiny_policies.SEQUENCES},
        reference={"model": {"path": str(inputs / "model")}, "others": {"second": {"model": {"path": str(inputs / "other")}}}},
    )  # fmt: skip
    if broken:
        message = fails(config, happening="role_has_other_weights", role="reference", folder=str(inputs / "other"))
        assert message.startswith("the reference's log-probs differ from the actor's by ")
        return
    assert train(config)[0] == "done"
    (metrics,) = tiny_policies.metrics_of(tmp_path / "run")
    assert metrics["actor/sequence_kl/reference"] == 0 and metrics["actor/sequence_kl/second"] > 0


@pytest.mark.parametrize(
    ("name", "where"), [("grpo", r"of a group with the rewards \[.*\]"), ("ppo", "of the rollout")]
)
def test_advantages_that_do_not_add_up_to_zero(inputs, tmp_path, name, where):
    message = fails(tiny_policies.make_config(inputs, tmp_path / "run", name), happening="advantages_are_off", by=1e-3)
    assert re.fullmatch(rf"the advantages {where} add up to 0\.0\d+, not to 0; report this", message)


def test_a_language_model_as_the_reward_model_is_told_by_its_key(inputs, tmp_path):
    config = tiny_policies.make_config(inputs, tmp_path / "run", reward={"model": {"path": str(inputs / "other")}})
    ended, message, _ = train(config)
    assert (ended, message.count("\n")) == ("ModelError", 0), message
    assert message.startswith(f"reward.model.path: {inputs / 'other'}: ") and "score.weight" in message


# -- the first update ------------------------------------------------------------------------------------------------------


def test_trap_18_dropout_in_config_json(inputs, tmp_path):
    """Without the check the run goes on: what it samples and compares with is free of dropout, only the updates have it."""
    folder = shutil.copytree(inputs / "model", tmp_path / "dropout")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"attention_dropout": 0.3}))
    actor = {"model": {"path": str(folder)}, "engine": engine("megatron")}
    config = tiny_policies.make_config(inputs, tmp_path / "run", actor=actor)
    message = fails(config)
    assert re.match(r"before the first update \d+ of \d+ ratios are not 1 \(log-probs differ by up to ", message)
    assert "Set a dropout of config.json to 0" in message
    unguarded = tiny_policies.merge(config, {"output_dir": str(tmp_path / "unguarded"), "train": {"guards": False}})
    assert train(unguarded)[0] == "done"
    rows = tiny_policies.metrics_of(tmp_path / "unguarded")
    assert rows[0]["actor/ratio_max"] > 1.001 and rows[0]["actor/sequence_kl"] == 0.0
    assert max(row.get("rollout/logprob_gap_max", 0.0) for row in rows) < 1e-5


@pytest.mark.parametrize(
    ("name", "what", "says"),
    [
        ("grpo", "up_proj", "mlp.up_proj.weight: it has a gradient but the step did not change it"),
        ("grpo", "skip", "the actor's gradient norm is inf (a gradient is not finite)"),
        ("ppo", "lm_head", "the critic as it should: score.weight: it has a gradient but"),
    ],
)
def test_a_step_that_does_not_train(inputs, tmp_path, name, what, says):
    """The mini-batch is kept, and the message says where, and that no checkpoint is there to go back to."""
    message = fails(tiny_policies.make_config(inputs, tmp_path / "run", name), happening="step_changes", what=what)
    assert message.startswith("step 1: ") and says in message
    failed = tmp_path / "run" / "failed" / "step_1.pt"
    assert message.endswith(f"; the batch is in {failed}; no good checkpoint had been saved") and failed.exists()


@pytest.mark.slow
def test_a_fault_in_the_second_step_leaves_the_checkpoint_of_the_first(inputs, tmp_path):
    """Below a value head that starts at zero, training shows in the second step. What was saved before it is not lost."""
    config = tiny_policies.make_config(inputs, tmp_path / "run", "ppo", checkpoint={"every": 1})
    message = fails(config, happening="step_changes", what="gate_proj", role="critic")
    assert message.startswith("step 2: the step did not train the critic as it should: ") and "gate_proj" in message
    assert message.endswith(f"; {tmp_path / 'run' / 'checkpoints' / 'step_00000001'} holds the very state that failed")
    assert train(config)[0] == "done"


# -- what is right ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", nightly_but(["grpo"], ["grpo", "ppo"]))
def test_rewards_that_are_all_equal_are_no_fault(inputs, tmp_path, name):
    config = tiny_policies.make_config(
        inputs, tmp_path / "run", name, rewards=tiny_policies.rewards_by(tmp_path, "return 0.0"), train={"steps": 4}
    )
    ended, message, said = train(config)
    assert (ended, message) == ("done", "")
    lines = [line for line in said.splitlines() if "rewards are equal" in line]
    expected = "step 1: every group's rewards are equal: this rollout trains nothing by rewards; if it stays so, "
    assert len(lines) == (name == "grpo") and all(line.startswith(expected) for line in lines), said


@pytest.mark.slow
def test_a_critic_whose_first_returns_are_all_zero(inputs, tmp_path):
    """Its head stays at zero then, so that it has a gradient in a later step, and what is below it in the one after that."""
    steps, sparse = 12, tiny_policies.rewards_by(tmp_path, "return float(row['answer'] == '6')")
    config = tiny_policies.make_config(
        inputs, tmp_path / "run", "ppo", rewards=sparse, train={"steps": steps}, data={"shuffle": False},
        algorithm={"mini_batch_size": 3},
    )  # fmt: skip
    assert train(config)[:2] == ("done", "")
    norms = [row["critic/grad_norm"] for row in tiny_policies.metrics_of(tmp_path / "run")]
    assert norms[0] == 0.0 and any(norms[1:])
