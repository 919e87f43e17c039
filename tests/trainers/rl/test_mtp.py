"""A policy's MTP layers train beside it (`actor.model.mtp`): they learn what it sampled, and it is the policy that it is
without them.

Everything but their own loss and weights is compared bit for bit with a run without them; their loss of the first step with
the paper's equations in plain torch on the samples that the run wrote (tests/engine/mtp.py), gradients in
tests/engine/test_mtp.py.
"""

import json

import pytest
import torch

from mrl.batch import make_batch
from tests.engine import mtp
from tests.tiers import nightly_but
from tests.trainers import tiny_runs
from tests.trainers.rl import test_layouts, tiny_policies
from tests.trainers.rl.tiny_policies import SEQUENCES, VOCAB, engine, train

STEPS, TEMPERATURE = 3, 0.8
LOSS = "actor/mtp_loss"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with two MTP layers."""
    place = tmp_path_factory.mktemp("mtp") / "model"
    tokenizer = tiny_runs.load_example("arithmetic/make_data.py").make_tokenizer()
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    mtp.make_model(str(place), "glm4_moe", layers=2, vocab=VOCAB, **ends)
    tokenizer.save_pretrained(place)
    return place


def config_of(inputs, folder, output, name="grpo", chosen=None, trains=True, **changes):
    """Iterations of one step each, unless `changes` says otherwise. chosen: the actor's engine."""
    changes = tiny_policies.merge({"algorithm": {"mini_batch_size": SEQUENCES}, "train": {"steps": STEPS}}, changes)
    config = tiny_policies.make_config(inputs, output, name, **changes)
    config["actor"]["model"]["path"], config["actor"]["engine"] = str(folder), chosen or engine("megatron")
    if trains:
        config["actor"]["model"]["mtp"] = {}
    return config


def sampled(output):
    """The sequences of the first iteration, as a batch."""
    rows = tiny_policies.samples_of(output)["step_00000001.jsonl"]
    assert len(rows) == SEQUENCES
    return make_batch([row["tokens"] for row in rows], [row["mask"] for row in rows])


@pytest.mark.slow
@pytest.mark.parametrize("name", nightly_but(["grpo"], ["grpo", "ppo"]))
def test_the_policy_is_the_one_without_them(inputs, folder, tmp_path, name):
    chosen = engine("megatron", size=1 if name == "ppo" else 3)
    changes = {} if name == "ppo" else {"reference": {"update_every": 1}}
    said = train(config_of(inputs, folder, tmp_path / "with", name, chosen, **changes))
    train(config_of(inputs, folder, tmp_path / "without", name, chosen, trains=False, **changes))
    rows, others = (tiny_policies.metrics_of(tmp_path / run) for run in ("with", "without"))
    losses = [row.pop(LOSS) for row in rows]
    assert rows == others and len(rows) == STEPS
    assert tiny_policies.samples_of(tmp_path / "with") == tiny_policies.samples_of(tmp_path / "without")
    _, first, _ = mtp.reference(str(folder), sampled(tmp_path / "with"), 1.0, temperature=TEMPERATURE)
    assert losses[0] == pytest.approx(first, rel=1e-6)
    made, bare, start = map(tiny_policies.weights_of, (tmp_path / "with/hf", tmp_path / "without/hf", folder))
    assert all(torch.equal(made[name], weight) for name, weight in bare.items())
    assert made.keys() == start.keys()
    assert not any(torch.equal(made[name], start[name]) for name in made.keys() - bare.keys() if ".eh_proj." in name)
    assert json.loads((tmp_path / "with/hf/config.json").read_text())["num_nextn_predict_layers"] == 2
    # of the actor they train; the other roles' stay out, and the run says so
    assert "actor.model.path: " not in said
    other = "critic" if name == "ppo" else "reference"
    assert f"{other}.model.path: {folder} has layers that predict further tokens" in said


@pytest.mark.slow
def test_stopped_after_a_step_it_goes_on_bitwise(inputs, folder, tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(config_of(inputs, folder, whole))
    train(config_of(inputs, folder, stopped), ended="stopped", happening="forwards_are_counted", stop_after=2)
    assert len(tiny_policies.metrics_of(stopped)) == 1
    train(config_of(inputs, folder, stopped))
    assert tiny_policies.metrics_of(stopped) == tiny_policies.metrics_of(whole)
    assert LOSS in tiny_policies.metrics_of(whole)[-1]
    weights = tiny_policies.weights_of(whole / "hf")
    assert all(torch.equal(w, weights[n]) for n, w in tiny_policies.weights_of(stopped / "hf").items())


@pytest.mark.slow
def test_an_iteration_is_the_same_on_two_processes(inputs, folder, tmp_path):
    two_steps = {"algorithm": {"mini_batch_size": SEQUENCES // 2}, "train": {"steps": 2}}
    for place, world, of in ((tmp_path / "one", 1, None), (tmp_path / "two", 2, engine("megatron", cp=2))):
        train(config_of(inputs, folder, place, chosen=of, **two_steps), world)
    one, two = (tiny_policies.metrics_of(tmp_path / place) for place in ("one", "two"))
    assert all(LOSS in row for row in one)
    tiny_policies.assert_close_metrics(two, one, 1e-5)
    made, expected = (moving(tiny_policies.weights_of(tmp_path / place / "hf")) for place in ("two", "one"))
    test_layouts.assert_same_update(made, expected, tiny_policies.weights_of(folder))


def moving(weights):
    """Without the routers' biases, which are no parameters."""
    return {name: weight for name, weight in weights.items() if not name.endswith("e_score_correction_bias")}
