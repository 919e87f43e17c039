"""What other trainers fell into (shared/TRAPS.md's kinds, by number), in whole runs of `mrl ppo`.

Where the other numbers are tested that an RL run can meet:
- 5, 6, 20, 21, 22 (loss and gradient of actor and critic, however cut): test_by_hand.py, and test_layouts.py in every layout;
  a KL in the reward: test_experience.py; of the functions alone, tests/algorithms.
- 13 (padded vocabulary), 27 (roles share no state): test_layouts.py.
- 18, 19 (dropout in log-probs, temperature): test_guards.py and test_by_hand.py.
- 11, 12, 29, 31: tests/roles. 23, 25, 32: tests/resume. 34: tests/trainers/test_sft.py, with the same RunDirectory.
"""

import pytest

from tests.tiers import nightly_but
from tests.trainers.rl import tiny_policies
from tests.trainers.rl.tiny_policies import EVAL_ROWS, TRAIN_ROWS, engine, train

ENVIRONMENT = '''
class Twice:
    """Says how long what it heard was, once."""

    def reset(self, row):
        self.heard = 0

    def step(self, text):
        self.heard += 1
        return "1+1=" * (1 + len(text) % 2), float(len(text) % 3), self.heard == 2
'''


@pytest.fixture
def environment(tmp_path):
    file = tmp_path / "environment.py"
    file.write_text(ENVIRONMENT)
    return {"environment": f"{file}:Twice", "max_new_tokens": 24}


def test_trap_7_tokens_are_those_that_the_policy_said(inputs, tmp_path, environment):
    """In conversations of two turns; on one process, and on two whose replicas have other numbers of tokens."""
    runs = {}
    for world, label in ((1, "one"), (2, "two")):
        config = tiny_policies.make_config(inputs, tmp_path / label, "ppo", rollout=environment, rewards=None)
        train(config, world)
        runs[label] = tiny_policies.metrics_of(tmp_path / label)
    rows = tiny_policies.samples_of(tmp_path / "one")["step_00000001.jsonl"]
    said = [sum(row["mask"]) for row in rows]
    after_prompt = [len(row["tokens"]) - row["mask"].index(1) for row in rows]
    assert any(row["turns"] == 2 for row in rows) and sum(said) < sum(after_prompt)
    assert runs["one"][-1]["train/tokens"] == sum(said)
    first, turns = runs["one"][0], sum(row["turns"] for row in rows)
    assert first["rollout/response_length"] == sum(said) / len(said)
    assert (first["rollout/turns"], first["rollout/tool_calls"]) == (turns / len(rows), 0.0)
    assert first["rollout/turn_length"] == sum(said) / turns <= first["rollout/turn_length_max"] <= 24
    assert first["rollout/observation_length"] == (sum(after_prompt) - sum(said)) / len(rows) > 0
    for row in rows:
        roles = [message["role"] for message in row["conversation"]]
        assert roles == (["assistant", "user"] * row["turns"])[: len(roles)]
        spoken = [message["content"] for message in row["conversation"] if message["role"] == "assistant"]
        assert "\n\n".join(spoken) == row["completion"]
    tiny_policies.assert_close_metrics(runs["two"], runs["one"], 1e-5)
    for row in rows:  # what the environment said has no log-prob
        assert all((log_prob < 0) == bool(mask) for log_prob, mask in zip(row["log_probs"], row["mask"], strict=True))


@pytest.mark.parametrize(("name", "mini_batch"), nightly_but([("ppo", 2)], [("ppo", 2), ("grpo", 1)]))
def test_trap_5_6_and_8_a_replica_with_little_or_nothing_counts_by_its_tokens(inputs, tmp_path, name, mini_batch):
    """Mini-batches of two sequences on two replicas: each has one, of 1 to 8 tokens. A mean of the replicas' means would
    weigh them alike, in ppo, whose loss is the mean over tokens. Of one sequence: a replica has none."""
    steps = tiny_policies.SEQUENCES // mini_batch
    runs = []
    for world, layout in ((1, engine(size=2)), (2, engine("megatron", size=1))):
        folder = tmp_path / str(world)
        changes = {"algorithm": {"mini_batch_size": mini_batch}, "train": {"steps": steps}}
        train(tiny_policies.make_config(inputs, folder, name, actor={"engine": layout}, **changes), world)
        runs.append(tiny_policies.metrics_of(folder))
    lengths = {row["response_length"] for row in tiny_policies.samples_of(tmp_path / "1")["step_00000001.jsonl"]}
    assert len(lengths) > 2 and len(runs[0]) == steps
    tiny_policies.assert_close_metrics(runs[1], runs[0], 1e-5)


def test_trap_27_a_step_reports_only_what_it_measured(inputs, tmp_path):
    """The first step of an iteration has its rollout's metrics, the second has not; no actor's before it trains."""
    config = tiny_policies.make_config(
        inputs, tmp_path / "run", "ppo", algorithm={"critic_warmup": 2}, train={"steps": 6, "eval_every": 4},
        data={"eval": {"new": str(inputs / "eval.jsonl"), "old": {"path": str(inputs / "train.jsonl")}}},
    )  # fmt: skip
    train(config)
    zeroth, *rows = tiny_policies.metrics_of(tmp_path / "run")
    assert all(name == "step" or name.startswith("eval/") for name in zeroth)
    for row in rows:
        of_rollout = {name for name in row if name.startswith(("reward/", "rollout/", "advantage/"))}
        assert bool(of_rollout) == (row["step"] % 2 == 1)
        assert ("actor/loss" in row) == ("train/loss" in row) == (row["step"] > 2)
        assert "critic/loss" in row
        assert ("eval/accuracy" in row) == ("eval/new/accuracy" in row) == (row["step"] in (4, 6))
    answers = tiny_policies.samples_of(tmp_path / "run")["eval_00000004.jsonl"]
    new = [row["reward"] for row in answers if "eval.jsonl" in row["row"]]
    assert {row["index"] for row in answers} == set(range(EVAL_ROWS + TRAIN_ROWS)) and len(new) == EVAL_ROWS
    assert rows[3]["eval/new/reward"] == pytest.approx(sum(new) / len(new), rel=1e-6) != rows[3]["eval/old/reward"]
