"""What is made of a rollout before it is trained on, with roles that predict given numbers, against plain Python."""

import math

import pytest
import torch

from mrl.algorithms.kl import KLController
from mrl.algorithms.recipes import overlong_cache, recipe
from mrl.batch import make_batch
from mrl.trainers.rl.experience import Experience, make_experience
from mrl.trainers.rl.roles import References

MASKS = [[0, 0, 1, 1, 1], [0, 1, 1], [0, 0, 1, 0, 1, 1]]
SCORES, COEF, GAMMA, LAMBDA = [1.0, -0.5, 2.0], 0.7, 0.9, 0.8


class Roles:
    """A dispatch whose roles predict, of a batch's labels, numbers that follow from the label alone."""

    numbers = {"actor": 0.10, "reference": 0.07, "critic": 0.30}

    def forward(self, role, batch, ctx):
        name = "values" if role == "critic" else "log_probs"
        return {name: torch.sin(self.numbers[role] * batch.labels.float()) - float(role != "critic")}


@pytest.fixture(scope="module")
def batch():
    tokens = torch.arange(sum(map(len, MASKS))).split([len(mask) for mask in MASKS])
    groups = {"groups": torch.tensor([0, 0, 1])}
    return make_batch([row.tolist() for row in tokens], MASKS, sequence_fields=groups)


def experience(batch, name, **parts):
    dispatch, made = Roles(), recipe(name, parts)
    asked = {"reference": lambda part, ctx: dispatch.forward("reference", part, ctx)}
    references = References(asked) if made.needs_reference else None
    return make_experience(
        batch, torch.tensor(SCORES, dtype=torch.float64), dispatch=dispatch, recipe=made, references=references,
        kl=KLController(COEF), iteration=0, mini_batch_size=1, temperature=1.0, max_response_length=8, baselines_S=None,
    )  # fmt: skip


def test_rewards_values_and_advantages_by_hand(batch):
    """The KL's coefficient is the controller's, which is steered, and not the recipe's; a value is that of its own token's state."""
    made = experience(batch, "ppo", gamma=GAMMA, lam=LAMBDA, whiten=False).batch.token_fields
    labels = iter(batch.labels.split(batch.lengths.tolist()))
    found = {name: iter(made[name].split(batch.lengths.tolist())) for name in ("advantages", "returns", "old_values")}
    for mask, score, of_row in zip(MASKS, SCORES, labels, strict=True):
        actions = [i for i, trains in enumerate(mask[1:]) if trains]
        values = [math.sin(0.3 * int(of_row[i])) for i in actions] + [0.0]
        rewards = [COEF * (math.sin(0.07 * int(of_row[i])) - math.sin(0.1 * int(of_row[i]))) for i in actions]
        rewards[-1] += score
        advantages, following = [], 0.0
        for n in reversed(range(len(actions))):
            following = rewards[n] + GAMMA * values[n + 1] - values[n] + GAMMA * LAMBDA * following
            advantages.insert(0, following)
        expected = {"advantages": advantages, "old_values": values[:-1]}
        expected["returns"] = [a + v for a, v in zip(advantages, values, strict=False)]
        for name, numbers in expected.items():
            row = [0.0] * len(of_row)
            for i, number in zip(actions, numbers, strict=True):
                row[i] = number
            assert next(found[name]).tolist() == pytest.approx(row, abs=1e-6), name


def test_each_epoch_has_an_order_of_its_own(batch):
    """Each trains every sequence once; the first in the order of the rollout."""
    rows = [[i, i] for i in range(12)]
    many = make_batch(rows, [[0.0, 1.0]] * 12)

    def order(iteration, epoch):
        made = Experience(many, iteration)
        parts = [made.mini_batch(3 * epoch + part, size=4, seed=5) for part in range(3)]
        assert all(part.denominators == {"tokens": 4.0, "sequences": 4.0} for part in parts)
        return torch.cat([part.tokens for part in parts]).tolist()

    orders = [order(iteration, epoch) for iteration in (0, 1) for epoch in (1, 2)]
    assert all(sorted(found) == list(range(12)) for found in orders)
    assert order(0, 0) == order(1, 0) == list(range(12))
    assert len({tuple(found) for found in (*orders, range(12))}) == 5


@pytest.mark.parametrize(("fraction", "limit", "cache"), [(0.2, 8, 2), (0.2, 20480, 4096), (0.2, 21, 5), (0.0, 8, 0)])
def test_overlong_cache_is_rounded_up(fraction, limit, cache):
    assert overlong_cache(recipe("dapo", {"overlong_fraction": fraction}), max_response_length=limit) == cache
