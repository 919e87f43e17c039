"""What each key of `algorithm` and each role does in whole runs: counted, or compared with a few lines of plain Python."""

import itertools
import json
import math

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from mrl.algorithms.kl import KLController
from mrl.algorithms.recipes import RECIPES, recipe
from mrl.batch import make_batch
from mrl.trainers.rl.experience import make_experience
from tests.tiers import nightly_but
from tests.trainers.rl import tiny_policies
from tests.trainers.rl.tiny_policies import engine, train


def answers(folder, iteration=0, series="step"):
    """The samples of an iteration of two steps, group by group."""
    rows = tiny_policies.samples_of(folder)[f"{series}_{2 * iteration + 1:08d}.jsonl"]
    return [list(group) for _, group in itertools.groupby(rows, key=lambda row: row["row"])]


# -- every algorithm -------------------------------------------------------------------------------------------------------


RUN_ELSEWHERE = ("ppo", "grpo", "dapo", "remax", "dr_grpo", "gspo", "opd")  # below, and in the files beside this one


@pytest.mark.parametrize(
    "name", nightly_but(["rloo", "reinforce_pp_baseline"], [name for name in RECIPES if name not in RUN_ELSEWHERE])
)
def test_two_iterations_of_every_algorithm(inputs, tmp_path, name):
    """Every weight has moved, metrics are finite, and the second rollout is another one."""
    folder = tmp_path / "run"
    train(tiny_policies.make_config(inputs, folder, name, actor={"engine": engine("megatron")}, train={"steps": 4}))
    rows, before = tiny_policies.metrics_of(folder), tiny_policies.weights_of(inputs / "model")
    assert [row["iteration"] for row in rows] == [1, 1, 2, 2]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert not [
        name for name, weight in tiny_policies.weights_of(folder / "hf").items() if torch.equal(weight, before[name])
    ]
    first, second = ([row["tokens"] for group in answers(folder, i) for row in group] for i in (0, 1))
    assert first != second and len(first) == len(second) == tiny_policies.SEQUENCES


def test_an_iteration_has_epochs_times_mini_batches_optimizer_steps(inputs, tmp_path):
    """`epochs * (train_batch / mini_batch)`, of each role that trains; each epoch trains every token once."""
    epochs, mini_batch = 2, 6
    folder, count = tmp_path / "run", epochs * (tiny_policies.SEQUENCES // mini_batch)
    config = tiny_policies.make_config(
        inputs, folder, "ppo", algorithm={"epochs": epochs, "mini_batch_size": mini_batch}, train={"steps": 2 * count}
    )  # fmt: skip
    printed = train(config, happening="steps_are_counted")
    counted = next(line for line in printed.splitlines() if line.startswith("counted: "))
    assert json.loads(counted.removeprefix("counted: ")) == {"critic": 2 * count, "actor": 2 * count}
    rows = tiny_policies.metrics_of(folder)
    assert [row["iteration"] for row in rows] == [1] * count + [2] * count
    sampled = sum(row["response_length"] for row in tiny_policies.samples_of(folder)["step_00000001.jsonl"])
    assert rows[count - 1]["train/tokens"] == epochs * sampled
    assert list(tiny_policies.samples_of(folder)) == ["step_00000001.jsonl", f"step_{count + 1:08d}.jsonl"]


# -- single keys -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_critic_warmup(inputs, tmp_path):
    """The critic alone learns for three steps: the actor begins in the middle of an iteration, at its own first rate."""
    folder = tmp_path / "run"
    config = tiny_policies.make_config(
        inputs, folder, "ppo", algorithm={"critic_warmup": 3}, train={"steps": 6},
        actor={"optimizer": {"schedule": "linear", "lr": 3e-3}},
    )  # fmt: skip
    printed = train(config, happening="steps_are_counted")
    assert 'counted: {"critic": 6, "actor": 3}' in printed
    rows = tiny_policies.metrics_of(folder)
    assert [row.get("train/lr") for row in rows] == [
        None,
        None,
        None,
        *(pytest.approx(lr) for lr in (3e-3, 2e-3, 1e-3)),
    ]
    assert [row["train/tokens"] > 0 for row in rows] == [False] * 3 + [True] * 3
    assert rows[2]["actor/sequence_kl"] == 0.0 and rows[3]["actor/ratio_max"] == 1.0
    assert rows[4]["actor/sequence_kl"] != 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "zero", "reference"),
    nightly_but([(3, [1, 3, 4], None)], [(3, [1, 3, 4], None), (4, [1, 3], engine(size=2))]),
    ids=str,
)
def test_reference_update_every(inputs, tmp_path, every, zero, reference):
    """At the end of an iteration in which N more steps were made the KL is 0 again: exactly, in the actor's layout."""
    folder = tmp_path / "run"
    config = tiny_policies.make_config(
        inputs, folder, actor={"engine": engine("megatron")}, reference={"engine": reference, "update_every": every},
        train={"steps": 8},
    )  # fmt: skip
    train(config)
    kls = [abs(row["actor/sequence_kl"]) for row in tiny_policies.metrics_of(folder) if "actor/sequence_kl" in row]
    bound = 0.0 if reference is None else 1e-4
    assert [i for i, kl in enumerate(kls, start=1) if kl <= bound] == zero, kls
    assert not list(folder.glob(".tmp-reference*"))


def test_kl_target_steers_the_coefficient(inputs, tmp_path):
    """After each iteration by `1 + gain * clip((KL - target) / target, -0.2, 0.2)` (Ziegler 2019); the loss has it.

    An iteration is one step: its ratios are 1, so that the mean of its loss over tokens is that of `-A`, and the KL's part.
    """
    folder, gain, target = tmp_path / "run", 0.5, 1e-3
    config = tiny_policies.make_config(
        inputs, folder, "grpo", train={"steps": 3},
        algorithm={
            "kl_coef": 0.1, "kl_target": target, "kl_gain": gain, "mini_batch_size": tiny_policies.SEQUENCES, "aggregation": "token_mean",
        },
        actor={"optimizer": {"lr": 3e-3}},
    )  # fmt: skip
    train(config)
    rows = tiny_policies.metrics_of(folder)
    found = [(row["actor/kl_coef"], row["actor/sequence_kl"]) for row in rows]
    coef, expected = 0.1, []
    for _, kl in found:
        expected.append(coef)
        coef *= 1 + gain * min(max((kl - target) / target, -0.2), 0.2)
    assert [coef for coef, _ in found] == pytest.approx(expected) and len(set(expected)) == 3
    assert found[1][0] < 0.1  # the first KL is 0, below any target
    parts = [row["actor/kl_coef"] * row["actor/kl"] - row["advantage/mean"] for row in rows]
    assert [row["actor/loss"] for row in rows] == pytest.approx(parts, abs=1e-6) and rows[2]["actor/kl"] > 1e-3


# -- dapo, remax -----------------------------------------------------------------------------------------------------------

SIGNAL_IN_SOME = "return float(len(completion)) if int(row['answer']) % 2 else 1.0"


def test_dynamic_sampling_takes_other_prompts(inputs, tmp_path):
    """Half of the prompts give one reward to all: their groups are left out and shown, others come instead."""
    folder = tmp_path / "run"
    train(tiny_policies.make_config(inputs, folder, "dapo", rewards=tiny_policies.rewards_by(tmp_path, SIGNAL_IN_SOME)))
    groups = answers(folder)
    trained = [group for group in groups if group[0]["advantage"] is not None]
    rejected = [group for group in groups if group[0]["advantage"] is None]
    assert len(trained) == 4 and rejected and all(len(group) == 3 for group in groups)
    assert all(len({row["reward"] for row in group}) > 1 for group in trained)
    assert all(len({row["reward"] for row in group}) == 1 for group in rejected)
    row = tiny_policies.metrics_of(folder)[0]
    assert row["rollout/prompts_rejected"] == len(rejected)
    assert row["reward/equal_groups"] == len(rejected) / len(groups)
    totals = [row["reward"] for group in trained for row in group]
    assert row["reward/mean"] == pytest.approx(sum(totals) / len(totals))


def test_dynamic_sampling_that_finds_too_few_says_what_it_found(inputs, tmp_path):
    config = tiny_policies.make_config(
        inputs, tmp_path / "run", "dapo", rewards=tiny_policies.rewards_by(tmp_path, "return 1.0"), algorithm={"max_sampling_rounds": 2}
    )  # fmt: skip
    message = train(config, ended="TrainingError")
    assert message.startswith(
        "algorithm.max_sampling_rounds: 2 rounds found 0 of 4 prompts whose completions have different rewards (8 had "
    )


def test_overlong_punishment_counts_observations_as_the_limit_does():
    """Of 8 tokens at most, all that follows the prompt counts: one sequence has 4 of the policy and 4 of an environment."""
    masks = [[0, 0, 1, 1, 1, 0, 0, 0, 0, 1], [0, 0, 1, 1, 1, 1]]
    batch = make_batch([list(range(len(mask))) for mask in masks], masks, sequence_fields={"groups": torch.zeros(2)})
    made = make_experience(
        batch, torch.ones(2, dtype=torch.float64), dispatch=None, recipe=recipe("dapo"), references=None, kl=KLController(0.0), iteration=0,
        mini_batch_size=2, temperature=1.0, max_response_length=8, baselines_S=None, old_log_probs=False,
    )  # fmt: skip
    advantages = [float(row[-1]) for row in made.batch.token_fields["advantages"].split(batch.lengths.tolist())]
    assert advantages == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-5)  # rewards 1 - 1 and 1


def test_remax_compares_with_the_greedy_answer(inputs, tmp_path):
    folder = tmp_path / "run"
    train(tiny_policies.make_config(inputs, folder, "remax"))
    baselines = answers(folder, series="baseline")
    assert [len(group) for group in baselines] == [1] * 4
    for group, (greedy,) in zip(answers(folder), baselines, strict=True):
        assert group[0]["row"] == greedy["row"]
        for row in group:
            discounts = [0.99**k for k in range(row["response_length"])]
            mean = (row["reward"] - greedy["reward"]) * sum(discounts) / len(discounts)
            assert row["advantage"] == pytest.approx(mean, abs=1e-6)


# -- roles, replay, checkpoints --------------------------------------------------------------------------------------------


def test_a_reward_model_scores_what_was_said(inputs, tmp_path):
    """In a layout of its own, beside a function; its number is that of transformers' classifier."""
    folder = tmp_path / "run"
    reward = {"model": {"path": str(inputs / "scorer")}, "weight": 2.0, "engine": engine("megatron", pp=2)}
    train(tiny_policies.make_config(inputs, folder, reward=reward, actor={"engine": engine("megatron", tp=2)}), world=2)
    scorer = AutoModelForSequenceClassification.from_pretrained(inputs / "scorer", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(inputs / "scorer")
    for row in (row for group in answers(folder) for row in group):
        talk = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
        with torch.no_grad():
            score = scorer(**tokenizer.apply_chat_template(talk, return_tensors="pt", return_dict=True)).logits.item()
        assert row["rewards"]["model"] == pytest.approx(score, abs=1e-5)
        assert row["reward"] == pytest.approx(2 * score + row["rewards"]["length"], abs=3e-5)
    assert "reward/model/mean" in tiny_policies.metrics_of(folder)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", nightly_but(["dapo"], ["remax", "dapo"]))
def test_recorded_rollouts_give_the_run_that_saved_them(inputs, tmp_path, name):
    """All metrics, the rollout's gap among them, and the weights, bit for bit; with evaluations, rejected groups, baselines.

    Also where a signal comes in the evaluation after step `stop_at`: the step is in the log then, without its evaluation.
    """
    stop_at = 4 if name == "dapo" else None
    changes = {
        "rewards": tiny_policies.rewards_by(tmp_path, SIGNAL_IN_SOME), "data": {"eval": str(inputs / "eval.jsonl")},
        "train": {"steps": 4, "eval_every": 2},
    }  # fmt: skip
    train(tiny_policies.make_config(inputs, tmp_path / "first", name, **changes))
    rollout = {"backend": "recorded", "path": str(tmp_path / "first" / "samples")}
    first, again = tmp_path / "first", tmp_path / "again"
    config = tiny_policies.make_config(inputs, again, name, rollout=rollout, **changes)
    if stop_at is not None:
        train(config, ended="stopped", happening="signal_in_evaluation", step=stop_at)
        *_, last = tiny_policies.metrics_of(first)[: stop_at + 1]
        without = {name: value for name, value in last.items() if not name.startswith("eval/")}
        assert tiny_policies.metrics_of(again) == [*tiny_policies.metrics_of(first)[:stop_at], without]
    train(config)
    assert tiny_policies.metrics_of(again) == tiny_policies.metrics_of(first)
    assert (
        tiny_policies.samples_of(again) == tiny_policies.samples_of(first) and len(tiny_policies.samples_of(first)) >= 5
    )
    expected = tiny_policies.weights_of(first / "hf")
    assert all(torch.equal(weight, expected[name]) for name, weight in tiny_policies.weights_of(again / "hf").items())


def test_the_best_checkpoint_is_kept(inputs, tmp_path):
    folder = tmp_path / "run"
    config = tiny_policies.make_config(
        inputs, folder, "dr_grpo", data={"eval": str(inputs / "eval.jsonl")}, train={"steps": 8, "eval_every": 2},
        checkpoint={"best": "eval/response_length", "best_is": "lowest", "keep": 1, "remote": f"file://{tmp_path}/remote"},
        actor={"optimizer": {"lr": 2e-2}},
    )  # fmt: skip
    train(config)
    found = {
        row["step"]: row["eval/response_length"]
        for row in tiny_policies.metrics_of(folder)
        if "eval/response_length" in row
    }
    del found[0]  # nothing is saved before the first step
    best = min(found, key=found.get)  # the first of equal ones
    for checkpoints in (folder / "checkpoints", tmp_path / "remote"):
        name = (checkpoints / "best").read_text().strip()
        assert name == f"step_{best:08d}"
        assert {path.name for path in checkpoints.glob("step_*")} == {name, "step_00000008"}
