"""Losses on scores against an oracle in plain Python floats, written down from each paper's equation, and its gradients
against central differences of that oracle.

Not here: that layouts and micro-batches of engines give the same (tests/trainers/test_rm.py).
"""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch

from mrl.algorithms.scores import DENOMINATOR, METRICS, ScoreLoss
from mrl.data.scored import ScoredRow, ScoredSequence, scored_batch
from tests.algorithms.sequences import in_micro_batches

PAIRS = [((5, 3), 0.0), ((4, 6), 0.7), ((2, 2), -0.3)]  # tokens of both, margin
ANSWERS = [(5, {4: 1.5}), (3, {2: -2.0}), (6, {5: 0.0}), (1, {0: 3.0})]  # tokens, place -> grade
STEPS = [(6, {1: 1.0, 3: 0.0, 5: 0.4}), (3, {2: 1.0}), (4, {0: 0.0, 3: 0.5})]


def rows_of(name: str) -> list[ScoredRow]:
    if name == "bradley_terry":
        return [
            ScoredRow(tuple(ScoredSequence(list(range(n)), (n - 1,), (0.0,)) for n in lengths), margin)
            for lengths, margin in PAIRS
        ]
    single = ANSWERS if name == "regression" else STEPS
    return [ScoredRow((ScoredSequence(list(range(n)), tuple(at), tuple(at.values())),)) for n, at in single]


def by_hand(name: str, centering: float, values: list[float]) -> float:
    """The loss of the whole mini-batch. values: of all tokens, end to end."""
    rest = list(values)
    take = lambda count: [rest.pop(0) for _ in range(count)]  # noqa: E731
    if name == "bradley_terry":
        losses = []
        for (first, second), margin in PAIRS:
            w, l = take(first)[-1], take(second)[-1]  # noqa: E741  # the papers' letter
            losses.append(math.log1p(math.exp(-(w - l - margin))) + centering * (w + l) ** 2)
        return sum(losses) / len(losses)
    if name == "regression":
        return sum((take(n)[-1] - at[n - 1]) ** 2 for n, at in ANSWERS) / len(ANSWERS)
    losses = []
    for n, at in STEPS:
        of_row = take(n)
        for place, label in at.items():
            p = 1 / (1 + math.exp(-of_row[place]))
            losses.append(-label * math.log(p) - (1 - label) * math.log(1 - p))
    return sum(losses) / len(losses)


def computed(name: str, centering: float, values_T: torch.Tensor, parts=None):
    """The loss and metrics, the batch in micro-batches of sequences `parts`."""
    batch = scored_batch(rows_of(name), group=2 if name == "bradley_terry" else 1)
    given = {"values": values_T}
    loss, metrics = in_micro_batches(ScoreLoss(name, centering), batch, given, DENOMINATOR, parts, temperature=1.0)
    assert set(metrics) == set(METRICS[name])
    return loss, metrics


CASES = [("bradley_terry", 0.0), ("bradley_terry", 0.05), ("regression", 0.0), ("steps", 0.0)]


def random_values(name: str, seed: int = 3) -> list[float]:
    rng = random.Random(seed)
    count = sum(len(sequence.ids) for row in rows_of(name) for sequence in row.sequences)
    return [rng.uniform(-2, 2) for _ in range(count)]


@pytest.mark.parametrize("name, centering", CASES)
def test_loss_and_gradient_are_those_of_the_equation(name, centering):
    """Micro-batches change neither the loss nor metrics."""
    values = random_values(name)
    values_T = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    loss, metrics = computed(name, centering, values_T)
    parts = ((4, 5), (0, 1, 2, 3)) if name == "bradley_terry" else ((1,), (0, 2, 3) if name == "regression" else (2, 0))
    in_parts, metrics_of_parts = computed(name, centering, values_T.detach(), parts)
    assert float(in_parts) == pytest.approx(float(loss.detach()), rel=1e-12)
    assert metrics_of_parts == pytest.approx(metrics, rel=1e-12)
    # grades and margins are fp32
    assert float(loss.detach()) == pytest.approx(by_hand(name, centering, values), rel=1e-7)
    loss.backward()
    for place in range(len(values)):
        either = []
        for step in (1e-5, -1e-5):
            moved = list(values)
            moved[place] += step
            either.append(by_hand(name, centering, moved))
        assert float(values_T.grad[place]) == pytest.approx((either[0] - either[1]) / 2e-5, abs=1e-7)


@pytest.mark.parametrize("name, centering", CASES)
def test_a_row_of_weight_2_is_the_row_twice(name, centering):
    """In loss, gradient and metrics; the first row counts half, and the last not at all."""
    rows, group = rows_of(name), 2 if name == "bradley_terry" else 1
    weights = [0.5, *[1.0] * (len(rows) - 2), 0.0]
    weighted = scored_batch([dataclasses.replace(r, weight=w) for r, w in zip(rows, weights, strict=True)], group=group)
    again = [row for row, weight in zip(rows, weights, strict=True) for _ in range(round(2 * weight))]
    values = torch.tensor(random_values(name), dtype=torch.float64).split(weighted.lengths.tolist())
    places = [i for i in range(weighted.num_sequences) for _ in range(round(2 * weights[i // group]))]
    if group == 2:  # a pair twice is its two sequences twice, in their order
        places = [
            2 * pair + side for pair in range(len(rows)) for _ in range(round(2 * weights[pair])) for side in (0, 1)
        ]
    found = []
    for batch, of_batch in ((weighted, values), (scored_batch(again, group=group), [values[i] for i in places])):
        values_T = torch.cat(list(of_batch))
        loss, ctx = ScoreLoss(name, centering)(batch, {"values": values_T}, {})
        numbers = {"loss": loss, **ctx["metrics"]}
        found.append({key: float(value) / batch.denominators[DENOMINATOR] for key, value in numbers.items()})
    assert found[0] == pytest.approx(found[1], rel=1e-12) and found[0]["loss"] != 0


def test_metrics_are_of_scores():
    values = torch.zeros(22, dtype=torch.float64)
    for place, score in ((4, 1.0), (7, 3.0), (11, 2.0), (17, 0.5), (19, 1.0), (21, 1.0)):
        values[place] = score
    found = computed("bradley_terry", 0.0, values)[1]
    assert found["rewards/chosen"] == pytest.approx(4 / 3) and found["rewards/rejected"] == pytest.approx(1.5)
    assert found["rewards/margin"] == pytest.approx((-2 + 1.5 + 0) / 3)
    assert found["rewards/accuracy"] == pytest.approx(1 / 3)  # equal scores are in no order
    values = torch.zeros(15, dtype=torch.float64)
    values[4], values[7], values[13], values[14] = 1.0, -2.5, 1.0, 2.0  # off by -0.5, -0.5, 1 and -1
    assert computed("regression", 0.0, values)[1] == {"rewards/mean": 0.375, "rewards/error": 0.75}
    values = torch.full((13,), -1.0, dtype=torch.float64)
    values[1] = values[3] = values[8] = (
        0.1  # right, wrong, right; the others say no, to 0.4, 0.0 (by a score of 0) and 0.5
    )
    values[9] = 0.0
    assert computed("steps", 0.0, values)[1] == {"steps/accuracy": pytest.approx(5 / 6), "steps/right": 3 / 6}


def test_scores_that_are_not_read_change_nothing():
    values = random_values("steps")
    loud = [value if place in (1, 3, 5, 8, 9, 12) else 1e6 for place, value in enumerate(values)]
    losses = [float(computed("steps", 0.0, torch.tensor(v, dtype=torch.float64))[0]) for v in (values, loud)]
    assert losses[0] == losses[1]


def test_large_scores_neither_overflow_nor_lose_their_gradient():
    values_T = torch.full((22,), 0.0, dtype=torch.float32, requires_grad=True)
    shifted = values_T + torch.tensor([-1e4 if place in (4, 11, 19) else 0.0 for place in range(22)])
    loss, _ = computed("bradley_terry", 0.0, shifted)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(1e4 + 0.4 / 3, rel=1e-6) and values_T.grad[4] == pytest.approx(-1 / 3)
