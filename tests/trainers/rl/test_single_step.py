"""Iterations of a single step, whose own forward gives the old log-probs: nothing but the time of a forward changes by it.

Everything is compared bit for bit: metrics, samples, weights. `forward` is counted per rollout and role.
"""

import json

import pytest
import torch

from tests.tiers import nightly_but
from tests.trainers.rl import tiny_policies
from tests.trainers.rl.tiny_policies import engine

STEPS = 3


def single(inputs, output, name="grpo", **changes):
    """Iterations of one step each."""
    base = {"algorithm": {"mini_batch_size": tiny_policies.SEQUENCES}, "train": {"steps": STEPS}}
    return tiny_policies.make_config(inputs, output, name, **tiny_policies.merge(base, changes))


def train(config, world=1, **kwargs):
    said = tiny_policies.train(config, world, **kwargs)
    counted = [line for line in said.splitlines() if line.startswith("counted: ")]
    return json.loads(counted[0].removeprefix("counted: ")) if counted else {}


def assert_same_run(one, other):
    assert (
        tiny_policies.metrics_of(one) == tiny_policies.metrics_of(other) and len(tiny_policies.metrics_of(one)) == STEPS
    )
    assert tiny_policies.samples_of(one) == tiny_policies.samples_of(other)
    weights = tiny_policies.weights_of(other / "hf")
    for name, weight in tiny_policies.weights_of(one / "hf").items():
        assert torch.equal(weight, weights[name]), name


CASES = {
    "gspo, corrected, tp2": ("gspo", 2, {"algorithm": {"correction": "truncate"}, "actor": {"engine": engine("megatron", tp=2)}}),
    "a critic, no KL": ("ppo", 1, {"algorithm": {"kl_in": "none"}}),
}  # fmt: skip


@pytest.mark.parametrize("case", nightly_but(["gspo, corrected, tp2"], CASES))
def test_the_run_is_the_one_with_a_forward_before_each_step(inputs, tmp_path, case):
    name, world, changes = CASES[case]
    train(single(inputs, tmp_path / "before", name, **changes), world, happening="old_log_probs_come_first")
    counted = train(single(inputs, tmp_path / "own", name, **changes), world, happening="forwards_are_counted")
    assert_same_run(tmp_path / "own", tmp_path / "before")
    assert counted["actor"] == 1, "the first rollout alone, whose ratios are checked"
    assert {counted.get(role, STEPS) for role in ("reference", "critic")} == {STEPS}


def test_stopped_between_rollout_and_step_it_goes_on_bitwise(inputs, tmp_path):
    """The checkpoint holds a rollout without old log-probs, and without the metrics that are made of them."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(single(inputs, whole))
    train(single(inputs, stopped), ended="stopped", happening="forwards_are_counted", stop_after=2)
    assert len(tiny_policies.metrics_of(stopped)) == 1
    train(single(inputs, stopped))
    assert_same_run(stopped, whole)


NEEDED = [
    ("ppo", {}, STEPS),  # the KL in the reward is made of them
    ("grpo", {"train": {"guards": False}}, STEPS),  # nothing has found that both forwards agree
    ("ppo", {"algorithm": {"kl_in": "none", "critic_warmup": 1}}, 2),  # no step of the actor's, then its first
]


@pytest.mark.parametrize(("name", "changes", "forwards"), nightly_but(NEEDED[:2], NEEDED))
def test_a_forward_before_the_step_where_it_is_needed(inputs, tmp_path, name, changes, forwards):
    counted = train(single(inputs, tmp_path / "run", name, **changes), happening="forwards_are_counted")
    assert counted["actor"] == forwards
