"""What `mrl ppo` says of a rollout and of held-out prompts, from made ones in which no two counts are equal."""

from __future__ import annotations

import dataclasses
import math
import statistics
from types import SimpleNamespace

import pytest
import torch

from mrl.algorithms.distill import TEACHER_OF
from mrl.batch import make_batch
from mrl.config.load import from_dict
from mrl.config.ppo import PPOConfig
from mrl.data.prompts import Prompt
from mrl.rewards.scorer import Scores
from mrl.rollout.base import Trajectory, TrajectorySource
from mrl.trainers import ppo
from mrl.trainers.rl.collect import ScoredRollout, conversation_metrics
from mrl.trainers.rl.evaluation import Evaluation
from mrl.trainers.rl.experience import Experience
from mrl.trainers.rl.roles import References
from mrl.trainers.rl.scoring import Scoring
from mrl.trainers.rl.show import histograms, mean_advantages
from mrl.trainers.rl.updates import policy_metrics, rollout_metrics
from tests.config.test_load import PPO_BASE


def answer(index: int, prompt: int, mask: list[int], finished: bool = False, **fields) -> Trajectory:
    """To prompt number `index`, of `prompt` tokens. mask: of the tokens after it."""
    count = prompt + len(mask)
    whole = Prompt(index, f"rows.jsonl:{index + 1}", {}, "", list(range(prompt)))
    return Trajectory(
        whole, fields.pop("sample", 0), list(range(count)), [0] * prompt + mask, [0.0] * count, "", finished, **fields
    )


LENGTHS = {0: (2, 5, 3), 1: (7, 1, 4)}  # of the answers to each prompt
PROMPTS = {0: 3, 1: 8}
FINISHED = {2, 3, 7, 1}  # lengths of those that did
REJECTED = (1, 1, 2, 3, 3, 3)  # two groups
GREEDY = (6, 9)


def collected(greedy: bool = True) -> ScoredRollout:
    answers = [
        answer(index, PROMPTS[index], [1] * n, n in FINISHED) for index, lengths in LENGTHS.items() for n in lengths
    ]
    scores = Scores(
        (1.0, 0.0, 0.25, 2.0, 2.0, 2.0), {"a": (1, 0, 0, 3, 1, 2), "b": (0, 0, 1, -1, 1, 0)}, ("one", "two")
    )
    of_greedy = ([answer(2, 4, [1] * n) for n in GREEDY], Scores((9.0, 9.0), {}, ("three",)))
    return ScoredRollout(
        answers, scores, torch.tensor([0, 0, 0, 1, 1, 1]), None,
        ([answer(3, 4, [1] * n) for n in REJECTED], Scores((5.0,) * 6, {})), of_greedy if greedy else ([], Scores((), {})),
        list(range(12)), rollout_s=4.0, reward_s=0.5,
    )  # fmt: skip


def test_a_rollout_is_counted_by_what_is_trained_on_and_its_speed_by_all_that_was_sampled():
    lengths, totals = [n for of in LENGTHS.values() for n in of], collected().scores.totals
    assert collected().metrics() == pytest.approx(
        {
            "reward/faults": 3, "reward/min": 0.0, "reward/max": 2.0,
            "reward/mean": 7.25 / 6, "reward/std": statistics.pstdev(totals),
            "reward/a/mean": 7 / 6, "reward/a/std": math.sqrt(15 / 6 - (7 / 6) ** 2),
            "reward/b/mean": 1 / 6, "reward/b/std": math.sqrt(3 / 6 - (1 / 6) ** 2),
            "rollout/response_length": sum(lengths) / 6, "rollout/response_length_min": 1,
            "rollout/response_length_max": 7, "rollout/response_length_finished": (2 + 3 + 7 + 1) / 4,
            "rollout/prompt_length": (3 + 8) / 2, "rollout/prompt_length_max": 8, "rollout/finished": 4 / 6,
            "rollout/tokens_per_s": (22 + 13 + 15) / 4.0, "rollout/prompts_rejected": 2,
            "reward/equal_groups": (1 + 2) / (2 + 2),  # of the two that are trained on one
        }
    )  # fmt: skip
    assert collected(greedy=False).metrics()["reward/faults"] == 2
    assert histograms(collected(), [0.5]) == {
        "histogram/reward": list(totals), "histogram/response_length": lengths, "histogram/advantage": [0.5],
    }  # fmt: skip


def test_turns_are_counted_by_conversation_and_their_tokens_by_turn():
    said = [{"role": role} for role in ("assistant", "tool", "tool", "assistant", "user", "assistant")]
    conversations = [
        answer(0, 3, [1, 1, 0, 1, 0, 0, 1, 1, 1, 1], turns=3, conversation=said),
        answer(1, 8, [1, 0, 0, 0, 0], turns=1, conversation=[{"role": "assistant"}, {"role": "tool"}]),
        answer(1, 8, [1, 1], turns=1, conversation=[{"role": "assistant"}]),
    ]
    assert conversation_metrics(conversations) == pytest.approx(
        {
            "rollout/turns": 5 / 3, "rollout/tool_calls": 3 / 3, "rollout/turn_length": (2 + 1 + 4 + 1 + 2) / 5,
            "rollout/turn_length_max": 4, "rollout/observation_length": (3 + 4) / 3,
        }
    )  # fmt: skip
    assert conversation_metrics([*conversations, answer(0, 3, [1])]) == {}


MASKS = [[0, 0, 1, 1, 1], [0, 1], [0, 1, 0, 1, 1]]  # of whole sequences
SAMPLER = [[9, -1.0, -2.0, -1.5], [-0.5], [-3.0, 9, -1.0, -0.25]]
TRAINER = [[7, -1.5, -1.0, -1.5], [-0.75], [-1.0, 7, -1.5, -0.5]]
REFERENCE = [[5, -1.0, -3.0, -2.0], [-0.5], [-2.0, 5, -1.0, -4.0]]
ADVANTAGES = [[0, 1.0, 2.0, 4.0], [-3.0], [0.5, 0, 0.5, 0.5]]


def experience(**sequences) -> Experience:
    """What a field has where nothing trains may reach no number."""
    rows = {
        "rollout_log_probs": SAMPLER,
        "old_log_probs": TRAINER,
        "ref_log_probs": REFERENCE,
        "advantages": ADVANTAGES,
    }
    fields = {name: torch.tensor([x for row in of for x in row], dtype=torch.float32) for name, of in rows.items()}
    batch = make_batch([list(range(len(m))) for m in MASKS], MASKS, token_fields=fields, sequence_fields=sequences)
    return Experience(batch, iteration=0)


def trained(rows: list[list[float]], at: tuple[int, ...] = (0, 1, 2)) -> list[list[float]]:
    return [[x for x, m in zip(rows[i], MASKS[i][1:], strict=True) if m] for i in at]


def test_distances_are_of_trained_tokens_of_sampler_and_reference_from_the_policy():
    """The KL of sequences of either sign: the second teacher's is below 0."""
    gaps = [
        abs(a - b) for both in zip(trained(SAMPLER), trained(TRAINER), strict=True) for a, b in zip(*both, strict=True)
    ]
    kl = [sum(a) - sum(b) for a, b in zip(trained(TRAINER), trained(REFERENCE), strict=True)]
    named = {"reference": None, "reference.others.b": None, "reference.others.idle": None}
    found = policy_metrics(
        SimpleNamespace(references=References(named)), experience(**{TEACHER_OF: torch.tensor([0, 1, 0])})
    )
    assert found == pytest.approx(
        {
            "rollout/logprob_gap": sum(gaps) / 7, "rollout/logprob_gap_max": 2.0, "actor/sequence_kl": sum(kl) / 3,
            "actor/sequence_kl/reference": (kl[0] + kl[2]) / 2, "actor/sequence_kl/b": kl[1],
        }
    )  # fmt: skip
    assert kl[1] < 0 < kl[0] != kl[2] and policy_metrics(SimpleNamespace(references=None), experience()).keys() == {
        "rollout/logprob_gap", "rollout/logprob_gap_max"
    }  # fmt: skip


@pytest.mark.parametrize("rewarded", [True, False])
def test_advantages_are_measured_as_they_train(rewarded):
    config = from_dict(PPO_BASE, PPOConfig)
    trainer = SimpleNamespace(
        config=config if rewarded else dataclasses.replace(config, rewards=None),
        recipe=SimpleNamespace(needs_reference=True), kl=SimpleNamespace(coef=0.125), references=None,
        samplings=[SimpleNamespace(take_seconds=lambda: 0.75)],
    )  # fmt: skip
    row = rollout_metrics(trainer, collected(), experience(), log_probs_s=0.0625)
    values = [1.0, 2.0, 4.0, -3.0, 0.5, 0.5, 0.5]
    expected = {
        "advantage/mean": sum(values) / 7, "advantage/std": statistics.pstdev(values), "actor/kl_coef": 0.125,
        "perf/rollout_s": 4.0, "perf/reward_s": 0.5, "perf/log_probs_s": 0.0625, "perf/weights_s": 0.75,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert ("reward/mean" in row) == ("reward/equal_groups" in row) == rewarded
    assert mean_advantages(experience()).tolist() == pytest.approx([7 / 3, -3.0, 0.5])


def test_the_seconds_of_a_step_are_those_of_its_phases():
    pending = {
        "perf/weights_s": 1.0,
        "perf/rollout_s": 2.0,
        "perf/reward_s": 4.0,
        "perf/log_probs_s": 8.0,
        "perf/x_s": 99.0,
    }
    assert ppo.join(pending, {"perf/update_s": 16.0})["perf/step_s"] == 31.0
    assert ppo.join({}, {"perf/update_s": 16.0})["perf/step_s"] == 16.0


HELD_OUT = {"new": [(2, 0.0), (5, 1.0), (1, 0.5), (4, 0.25)], "old": [(9, -1.0), (3, 3.0)]}  # answers: length, reward


class Given(TrajectorySource):
    """Gives the answers of HELD_OUT to prompts by their index."""

    def answer(self, prompts, asked):
        assert asked.series == "eval" and asked.greedy == (asked.samples == 1)
        every = [pair for of in HELD_OUT.values() for pair in of]
        chosen = [(p.index, i) for p in prompts for i in range(asked.samples)]
        return [answer(index, 3, [1] * every[2 * index + i][0], reward=every[2 * index + i][1]) for index, i in chosen]

    def close(self):
        """There is nothing to end."""


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_an_evaluation_has_the_best_of_each_prompt_and_the_mean_of_all(at_once):
    prompts = [answer(index, 3, []).prompt for index in range(3)]
    seen = []
    scores = Scoring(None, reports=None, on_main=lambda fn: fn(), first=(), say=print)
    made = Evaluation(
        {"new": prompts[:2], "old": prompts[2:]}, Given(), scores, samples=2, prompts_at_once=at_once,
        doing=seen.append, stop_requested=lambda: False, seen=lambda *what: None,
    )  # fmt: skip
    found = made.run(4)
    assert found.pop("perf/eval_s") >= 0
    assert found == pytest.approx(
        {
            "eval/accuracy": (1.0 + 0.5 + 3.0) / 3, "eval/reward": 3.75 / 6, "eval/response_length": 24 / 6,
            "eval/new/accuracy": 0.75, "eval/new/reward": 1.75 / 4, "eval/new/response_length": 12 / 4,
            "eval/old/accuracy": 3.0, "eval/old/reward": 1.0, "eval/old/response_length": 6.0,
            "eval/binary": 0.0, "eval/faults": 0,
        }
    )  # fmt: skip


def test_accuracy_is_of_the_first_function_and_of_the_total_where_there_is_none():
    scores = Scores((0.5, 2.0), {"first": (1.0, 0.0), "second": (-0.5, 2.0)})
    assert tuple(Scoring.accuracy_of(SimpleNamespace(rewards=object()), scores)) == (1.0, 0.0)
    assert tuple(Scoring.accuracy_of(SimpleNamespace(rewards=None), scores)) == (0.5, 2.0)


def test_a_reward_model_adds_its_weighted_score_and_the_environment_its_own():
    model = SimpleNamespace(score=lambda trajectories: [4.0, -2.0])
    made = Scoring(
        None, reports=None, on_main=lambda fn: fn(), first=(), say=print, reward_model=model, weight=0.25
    ).score([answer(0, 3, [1], reward=1.5), answer(0, 3, [1])], step=1, made=0)  # fmt: skip
    assert made.totals == (2.5, -0.5) and made.parts == {"model": (4.0, -2.0), "environment": (1.5, 0.0)}
