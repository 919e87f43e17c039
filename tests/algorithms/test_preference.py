"""Losses on preferences against an oracle in plain Python floats, written down from each paper's equation, and its
gradients against central differences of that oracle.

Not here: that layouts and micro-batches give the same (tests/trainers/test_dpo.py).
"""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch

from mrl.algorithms.preference import (
    DENOMINATOR,
    LOSSES,
    METRIC_DENOMINATORS,
    LossSettings,
    PreferenceLoss,
    kl_estimate,
)
from mrl.batch import Batch, make_batch
from mrl.config.dpo import ROWS
from mrl.data.preferences import with_denominators
from tests.algorithms.sequences import in_micro_batches

COUNTS = [(2, 3), (1, 3), (4, 1), (1, 1), (3, 2), (2, 2)]  # (prompt, answer) tokens: three pairs
KL = 0.3


def sequences(seed: int) -> tuple[Batch, list[list[float]], list[float]]:
    """A batch of pairs, log-probs of all its labels, and the reference's of its answers."""
    rng = random.Random(seed)
    ids = [list(range(prompt + answer)) for prompt, answer in COUNTS]
    masks = [[0] * prompt + [1] * answer for prompt, answer in COUNTS]
    reference = [-rng.uniform(0.5, 4) for _ in COUNTS]
    fields = {"chosen": torch.tensor([1, 0] * 3), "reference": torch.tensor(reference, dtype=torch.float64)}
    batch = with_denominators(make_batch(ids, masks, sequence_fields=fields), group=2)
    return batch, [[-rng.uniform(0.1, 2) for _ in range(p + a - 1)] for p, a in COUNTS], reference


def log_s(x: float) -> float:
    return -math.log1p(math.exp(-x))


def answers_of(log_probs: list[list[float]]) -> list[list[float]]:
    return [row[prompt - 1 :] for row, (prompt, _) in zip(log_probs, COUNTS, strict=True)]


def by_hand(name: str, n: LossSettings, log_probs: list[list[float]], reference: list[float]) -> float:
    """The loss of the whole mini-batch, from the equations of the papers."""
    lp = [sum(row) for row in answers_of(log_probs)]
    mean = [sum(row) / len(row) for row in answers_of(log_probs)]
    ref = [0.0] * len(reference) if n.reference_free else reference
    r = [a - b for a, b in zip(lp, ref, strict=True)]
    if n.length_normalized:
        r = [a / count for a, (_, count) in zip(r, COUNTS, strict=True)]
    losses = []
    for w, l in ((0, 1), (2, 3), (4, 5)):  # noqa: E741  # the papers' letter
        if name == "dpo":
            x = n.beta * (r[w] - r[l])
            losses.append(-(1 - n.label_smoothing) * log_s(x) - n.label_smoothing * log_s(-x))
        if name == "ipo":
            losses.append((r[w] - r[l] - 1 / (2 * n.beta)) ** 2)
        if name == "orpo":
            odds = [math.exp(mean[i]) / (1 - math.exp(mean[i])) for i in (w, l)]
            losses.append(-n.beta * log_s(math.log(odds[0] / odds[1])))
        if name == "simpo":
            losses.append(-log_s(n.beta * mean[w] - n.beta * mean[l] - n.gamma))
        if name == "kto":
            value = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
            losses.append(n.desirable_weight * (1 - value(n.beta * (r[w] - KL))))
            losses.append(n.undesirable_weight * (1 - value(n.beta * (KL - r[l]))))
    chosen = [token for row in answers_of(log_probs)[::2] for token in row]
    return sum(losses) / len(losses) - n.sft_weight * sum(chosen) / len(chosen)


def computed(name: str, n: LossSettings, batch: Batch, log_probs_T: torch.Tensor, parts=None):
    """The loss and metrics, the batch in micro-batches `parts`."""
    given = {"log_probs": log_probs_T}
    return in_micro_batches(PreferenceLoss(name, n), batch, given, DENOMINATOR, parts, kl=KL, temperature=1.0)


CASES = [
    ("dpo", LossSettings(beta=0.7)),
    ("dpo", LossSettings(beta=0.7, label_smoothing=0.2, sft_weight=0.5)),
    ("dpo", LossSettings(beta=0.7, reference_free=True)),
    ("dpo", LossSettings(beta=0.7, length_normalized=True)),
    ("ipo", LossSettings(beta=0.4)),
    ("ipo", LossSettings(beta=0.4, length_normalized=True, sft_weight=0.3)),
    ("kto", LossSettings(beta=0.6)),
    ("kto", LossSettings(beta=0.6, desirable_weight=1.5, undesirable_weight=0.5, sft_weight=0.2)),
    ("orpo", LossSettings(beta=0.3, sft_weight=1.0)),
    ("simpo", LossSettings(beta=2.0, gamma=0.6)),
]


@pytest.mark.parametrize("name, numbers", CASES)
def test_loss_and_gradient_are_those_of_the_papers_equation(name, numbers):
    """Micro-batches change neither the loss nor metrics."""
    batch, log_probs, reference = sequences(3)
    parts = ((4, 5), (0, 1, 2, 3))
    if name == "kto":
        batch, parts = with_denominators(batch, group=1), ((4,), (0, 3, 5), (1, 2))
    flat_T = torch.tensor([x for row in log_probs for x in row], dtype=torch.float64, requires_grad=True)
    loss, metrics = computed(name, numbers, batch, flat_T)
    assert float(loss.detach()) == pytest.approx(by_hand(name, numbers, log_probs, reference), rel=1e-12)
    in_parts, metrics_of_parts = computed(name, numbers, batch, flat_T.detach(), parts)
    assert float(in_parts) == pytest.approx(float(loss.detach()), rel=1e-12)
    assert metrics_of_parts == pytest.approx(metrics, rel=1e-12)
    loss.backward()
    place = 0
    for i, row in enumerate(log_probs):
        for j in range(len(row)):
            either = []
            for step in (1e-5, -1e-5):
                moved = [list(one) for one in log_probs]
                moved[i][j] += step
                either.append(by_hand(name, numbers, moved, reference))
            assert float(flat_T.grad[place]) == pytest.approx((either[0] - either[1]) / 2e-5, abs=1e-9)
            place += 1


def weighted(batch: Batch, weights: list[float], singles: set[int] = frozenset()) -> Batch:
    """The batch with a weight for each answer, and without pairs where an answer is one of `singles`."""
    of_pair = torch.tensor([float(i not in singles) for i in range(batch.num_sequences)])
    own = {"weight": torch.tensor(weights), "of_pair": of_pair}
    return dataclasses.replace(batch, sequence_fields={**batch.sequence_fields, **own})


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_metrics_are_means_weighted_by_rows(name):
    """Of kto two pairs and a good answer more, so that no two of its counts are equal. A pair of equal rewards is not in order."""
    batch, log_probs, reference = sequences(8)
    lp, n = [sum(row) for row in answers_of(log_probs)], LossSettings(beta=0.7)
    reference[3] = lp[3] - (lp[2] - reference[2])
    weights = [3.0, 3.0, 0.5, 0.5, 1.5, 1.5]
    fields = {**batch.sequence_fields, "reference": torch.tensor(reference, dtype=torch.float64)}
    batch, chosen, rejected, pairs = dataclasses.replace(batch, sequence_fields=fields), (0, 2, 4), (1, 3, 5), (0, 2, 4)
    if name == "kto":
        batch, rejected, pairs = weighted(batch, weights, {4, 5}).select([0, 1, 2, 3, 4]), (1, 3), (0, 2)
        log_probs = log_probs[:5]
    else:
        batch = weighted(batch, weights)
    batch = with_denominators(batch, group=1 if name == "kto" else 2)
    flat_T = torch.tensor([x for row in log_probs for x in row], dtype=torch.float64)
    _, found = computed(name, n, batch, flat_T)
    rewards = [0.7 * (a - b) for a, b in zip(lp, reference, strict=True)]
    mean = lambda at, values: sum(weights[i] * values(i) for i in at) / sum(weights[i] for i in at)  # noqa: E731
    tokens = sum(weights[i] * COUNTS[i][1] for i in chosen)
    expected = {
        "rewards/chosen": mean(chosen, lambda i: rewards[i]),
        "rewards/rejected": mean(rejected, lambda i: rewards[i]),
        "rewards/margin": mean(pairs, lambda i: rewards[i] - rewards[i + 1]),
        "logps/chosen": mean(chosen, lambda i: lp[i]),
        "logps/rejected": mean(rejected, lambda i: lp[i]),
        "nll/chosen": -sum(weights[i] * lp[i] for i in chosen) / tokens,
    }
    if name == "dpo":
        expected["rewards/accuracy"] = mean(pairs, lambda i: i != 2 and rewards[i] > rewards[i + 1])
        expected["reference/kl"] = mean(range(6), lambda i: reference[i] - lp[i])
        assert expected.keys() == METRIC_DENOMINATORS.keys()
        _, free = computed(name, LossSettings(beta=0.7, reference_free=True), batch, flat_T)
        assert free.keys() == found.keys() - {"reference/kl"}, "a log-prob is no distance"
    assert found == pytest.approx(expected, rel=1e-9) and len({round(x, 6) for x in expected.values()}) == len(expected)


@pytest.mark.parametrize("name", LOSSES)
def test_rewards_are_those_of_the_loss(name):
    """beta times the ratio to the reference, or the mean log-prob of a loss that has no reference, orpo's too."""
    batch, log_probs, reference = sequences(7)
    batch = with_denominators(batch, group=1) if name == "kto" else batch
    _, found = computed(name, LossSettings(beta=0.7), batch, torch.tensor([x for row in log_probs for x in row]))
    sums = [sum(row) for row in answers_of(log_probs)]
    means = [total / count for total, (_, count) in zip(sums, COUNTS, strict=True)]
    ratios = [a - b for a, b in zip(sums, reference, strict=True)]
    rewards = [0.7 * x for x in (means if name in ("orpo", "simpo") else ratios)]
    expected = {"rewards/chosen": sum(rewards[::2]) / 3, "rewards/rejected": sum(rewards[1::2]) / 3}
    expected["rewards/margin"] = expected["rewards/chosen"] - expected["rewards/rejected"]
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-5)


def test_only_answers_count_whatever_prompts_have():
    batch, log_probs, _ = sequences(1)
    flat_T = torch.tensor([x for row in log_probs for x in row])
    loud_T = flat_T.masked_fill(batch.loss_mask == 0, float("nan")).requires_grad_()
    plain, _ = computed("dpo", LossSettings(beta=0.5, sft_weight=1.0), batch, flat_T)
    loss, _ = computed("dpo", LossSettings(beta=0.5, sft_weight=1.0), batch, loud_T)
    assert float(loss) == float(plain)
    loss.backward()
    assert loud_T.grad.isfinite().all() and not loud_T.grad[batch.loss_mask == 0].any()


def test_orpo_of_a_certain_answer_is_finite():
    batch, _, _ = sequences(1)
    certain_T = torch.zeros(batch.num_tokens, requires_grad=True)
    loss, _ = computed("orpo", LossSettings(beta=0.1), batch, certain_T)
    loss.backward()
    assert math.isfinite(float(loss)) and certain_T.grad.isfinite().all()


def test_kto_of_a_batch_with_good_answers_alone():
    batch, log_probs, _ = sequences(1)
    good = with_denominators(batch.select([0, 2, 4]), group=1)
    of = [token for i in (0, 2, 4) for token in log_probs[i]]
    loss, found = computed("kto", LossSettings(beta=0.6), good, torch.tensor(of))
    assert math.isfinite(float(loss)) and found["rewards/rejected"] == 0.0


def test_the_kl_of_kto_is_the_mean_log_ratio_and_never_negative():
    assert kl_estimate(torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -1.0])) == pytest.approx(0.5)
    assert kl_estimate(torch.tensor([-3.0]), torch.tensor([-1.0])) == 0.0


def test_the_table_of_config_is_that_of_the_losses():
    assert ROWS.keys() == LOSSES.keys()
    for row in ROWS.values():
        LossSettings(**row)
