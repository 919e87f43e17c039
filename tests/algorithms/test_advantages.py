"""Advantages against the equations of their papers, written out in loops over lists.

Trap 7 (counting tokens by length, not by mask): observations between two actions must change nothing at all.

Rewards before advantages: placement, DAPO's two devices.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from mrl.algorithms import advantages as adv
from mrl.algorithms.advantages import groups_with_signal, overlong_penalty, token_rewards
from mrl.algorithms.ragged import (
    from_trained_columns,
    last_trained_position,
    sum_per_sequence,
    to_tokens,
    trained_columns,
)
from tests.algorithms.sequences import close, examples, flat, groups, ragged


@examples
@given(ragged(trained=False), st.booleans())
def test_traps_21_and_22_token_rewards(case, with_kl):
    """r_t = [t is the sequence's last action] score - coef kl_t, at actions alone, whatever a KL is elsewhere."""
    scores, kl = case.per_sequence(-1, 1), case.rows(-1, 1)
    expected = []
    for score, mask, kl_row in zip(scores, case.masks, kl, strict=True):
        last = max((t for t, m in enumerate(mask) if m), default=None)
        row = []
        for t, m in enumerate(mask):
            reward = score if t == last else 0.0
            reward -= 0.3 * kl_row[t] if with_kl and m else 0.0
            row.append(reward)
        expected.append(row)
    got = token_rewards(
        torch.tensor(scores, dtype=torch.float64),
        case.mask_T,
        case.lengths_S,
        kl_T=flat(kl).masked_fill(case.mask_T == 0, torch.nan) if with_kl else None,
        kl_coef=0.3,
    )
    assert close(got, expected)


def overlong_oracle(length, longest, cache):
    """Yu 2025, eq. 13."""
    if length <= longest - cache:
        return 0.0
    if length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0


@examples
@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(1, 30), st.data())
def test_overlong_penalty(lengths, longest, data):
    cache = data.draw(st.integers(1, longest))
    got = overlong_penalty(torch.tensor(lengths), max_length=longest, cache=cache)
    assert close(got, [overlong_oracle(length, longest, cache) for length in lengths])


@examples
@given(groups())
def test_groups_with_signal(case):
    """Of right and wrong answers it is Yu 2025, eq. 11: 0 < number of right answers < G."""
    rewards, numbers = case
    expected = [
        len({r for r, g in zip(rewards, numbers, strict=True) if g == number}) > 1 for number in numbers
    ]  # fmt: skip
    assert groups_with_signal(torch.tensor(rewards), torch.tensor(numbers)).tolist() == expected
    assert groups_with_signal(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []


DISCOUNTS = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def actions(row, mask):
    return [x for x, m in zip(row, mask, strict=True) if m]


def put_back(values, mask):
    """The numbers of the actions at their places, 0 elsewhere."""
    queue = list(values)
    return [queue.pop(0) if m else 0.0 for m in mask]


def gae_oracle(rewards, values, gamma, lam):
    """Schulman 2015, eq. 16: A_t = sum over l of (gamma lam)^l delta_(t+l)."""
    after = [*values, 0.0][1:]
    deltas = [r + gamma * v1 - v0 for r, v1, v0 in zip(rewards, after, values, strict=True)]
    n = len(deltas)
    return [sum((gamma * lam) ** k * deltas[t + k] for k in range(n - t)) for t in range(n)]


def returns_oracle(rewards, gamma):
    n = len(rewards)
    return [sum(gamma**k * rewards[t + k] for k in range(n - t)) for t in range(n)]


@examples
@given(ragged(trained=False), DISCOUNTS, DISCOUNTS)
def test_trap_7_gae_is_of_the_actions_alone(case, gamma, lam):
    rewards, values = case.rows(-1, 1), case.rows(-1, 1)
    got, returns = adv.gae(flat(rewards), flat(values), case.mask_T, case.lengths_S, gamma=gamma, lam=lam)
    expected, targets = [], []
    for r, v, m in zip(rewards, values, case.masks, strict=True):
        advantages = gae_oracle(actions(r, m), actions(v, m), gamma, lam)
        expected.append(put_back(advantages, m))
        targets.append(put_back([a + x for a, x in zip(advantages, actions(v, m), strict=True)], m))
    assert close(got, expected) and close(returns, targets)


@examples
@given(ragged(trained=False), DISCOUNTS)
def test_discounted_returns_and_remax(case, gamma):
    rewards, baselines = case.rows(-1, 1), case.per_sequence(-1, 1)
    got = adv.discounted_returns(flat(rewards), case.mask_T, case.lengths_S, gamma=gamma)
    kept = [actions(r, m) for r, m in zip(rewards, case.masks, strict=True)]
    assert close(got, [put_back(returns_oracle(r, gamma), m) for r, m in zip(kept, case.masks, strict=True)])
    baselines_S = torch.tensor(baselines, dtype=torch.float64)
    got = adv.remax(flat(rewards), baselines_S, case.mask_T, case.lengths_S, gamma=gamma)
    expected = [
        put_back(returns_oracle([*r[:-1], r[-1] - b] if r else r, gamma), m)
        for r, b, m in zip(kept, baselines, case.masks, strict=True)
    ]
    assert close(got, expected)


# -- groups -----------------------------------------------------------------------------------------------------------


def of_group(rewards, numbers, i):
    return [r for r, g in zip(rewards, numbers, strict=True) if g == numbers[i]]


def grpo_oracle(rewards, numbers, i):
    """Shao 2024: (r - mean) / std, with the sample's standard deviation."""
    group = of_group(rewards, numbers, i)
    if len(group) == 1:
        return 0.0
    mean = sum(group) / len(group)
    std = math.sqrt(sum((r - mean) ** 2 for r in group) / (len(group) - 1))
    return (rewards[i] - mean) / (std + 1e-6)


def group_mean_oracle(rewards, numbers, i):
    """Liu 2025: r - mean."""
    group = of_group(rewards, numbers, i)
    return rewards[i] - sum(group) / len(group)


def rloo_oracle(rewards, numbers, i):
    """Ahmadian 2024: r minus the mean of the others."""
    others = [r for j, (r, g) in enumerate(zip(rewards, numbers, strict=True)) if g == numbers[i] and j != i]
    return rewards[i] - sum(others) / len(others) if others else 0.0


ORACLES = {adv.grpo: grpo_oracle, adv.group_mean: group_mean_oracle, adv.rloo: rloo_oracle}


@pytest.mark.parametrize("estimate, oracle", ORACLES.items(), ids=lambda f: f.__name__)
@examples
@example(([0.1] * 3, [0] * 3))  # whose mean is rounded
@given(groups())
def test_group_relative(estimate, oracle, case):
    """Groups of any size, in any order. Without differences there is exactly no advantage."""
    rewards, numbers = case
    got = estimate(torch.tensor(rewards, dtype=torch.float64), torch.tensor(numbers))
    # of equal rewards the oracle's mean is off by one rounding error, which eps lifts to 1e-10 of the reward
    assert close(got, [oracle(rewards, numbers, i) for i in range(len(rewards))], 1e-8)
    for i, advantage in enumerate(got.tolist()):
        assert len(set(of_group(rewards, numbers, i))) > 1 or advantage == 0


# -- whitening and the table --------------------------------------------------------------------------------------------


@examples
@given(ragged(), st.sampled_from([0.0, 1000.0]))
def test_whiten(case, offset):
    rows = [[x + offset for x in row] for row in case.rows(-1, 1)]
    trained = [x for row, mask in zip(rows, case.masks, strict=True) for x in actions(row, mask)]
    mean = sum(trained) / len(trained)
    variance = sum((x - mean) ** 2 for x in trained) / len(trained)
    expected = [
        [(x - mean) / math.sqrt(variance + 1e-8) if m else 0.0 for x, m in zip(row, mask, strict=True)]
        for row, mask in zip(rows, case.masks, strict=True)
    ]
    assert close(adv.whiten(flat(rows), case.mask_T), expected, 1e-7)


def test_whiten_has_an_answer_where_nothing_differs_or_nothing_trains():
    assert not adv.whiten(torch.full((3,), 0.1), torch.ones(3)).any()
    assert not adv.whiten(torch.ones(3), torch.zeros(3)).any()


@pytest.mark.parametrize("name", adv.ESTIMATORS)
@examples
@given(case=ragged())
def test_every_estimator_by_its_name_is_zero_outside_the_mask(name, case):
    rewards = [[r * m for r, m in zip(*pair, strict=True)] for pair in zip(case.rows(-1, 1), case.masks, strict=True)]
    numbers = [case.rng.randrange(2) for _ in case.masks]
    baselines_S = torch.tensor(case.per_sequence(-1, 1), dtype=torch.float64)
    values_T = flat(case.rows(-1, 1))
    rollout = adv.AdvantageInputs(
        rewards_T=flat(rewards), mask_T=case.mask_T, lengths_S=case.lengths_S, groups_S=torch.tensor(numbers),
        values_T=values_T, baselines_S=baselines_S,
    )  # fmt: skip
    got, returns = adv.ESTIMATORS[name].compute(rollout, 0.9, 0.8)
    assert not got[case.mask_T == 0].any() and (returns is not None) == (name == "gae")
    oracle = {"grpo": grpo_oracle, "group_mean": group_mean_oracle, "rloo": rloo_oracle}.get(name)
    if oracle:
        scores = [sum(row) for row in rewards]
        per_sequence = [oracle(scores, numbers, i) for i in range(len(scores))]
        assert close(got, [[a * m for m in mask] for a, mask in zip(per_sequence, case.masks, strict=True)], 1e-6)
    args = (rollout.rewards_T, rollout.mask_T, rollout.lengths_S)
    expected = {
        "gae": lambda: adv.gae(args[0], values_T, args[1], args[2], gamma=0.9, lam=0.8)[0],
        "returns": lambda: adv.discounted_returns(*args, gamma=0.9),
        "remax": lambda: adv.remax(args[0], baselines_S, args[1], args[2], gamma=0.9),
    }
    assert oracle or torch.equal(got, expected[name]())


# -- ragged -----------------------------------------------------------------------------------------------------------


@examples
@given(ragged(trained=False))
def test_ragged(case):
    rows = case.rows(-1, 1)
    assert close(sum_per_sequence(flat(rows), case.lengths_S), [sum(row) for row in rows])
    sums = case.per_sequence(-1, 1)
    assert close(to_tokens(torch.tensor(sums, dtype=torch.float64), case.lengths_S), case.spread(sums))
    columns_NS = trained_columns(flat(rows), case.mask_T, case.lengths_S)
    assert torch.equal(from_trained_columns(columns_NS, case.mask_T, case.lengths_S), flat(rows) * case.mask_T)
    start, last = 0, []
    for mask in case.masks:
        last.append(max((start + i for i, m in enumerate(mask) if m), default=-1))
        start += len(mask)
    assert last_trained_position(case.mask_T, case.lengths_S).tolist() == last


def test_a_rollout_of_nothing_has_answers():
    none, no_lengths = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert adv.gae(none, none, none, no_lengths, gamma=1.0, lam=1.0)[0].shape == (0,)
    assert adv.grpo(none, no_lengths).shape == adv.whiten(none, none).shape == (0,)
    assert to_tokens(none, no_lengths).shape == last_trained_position(none, no_lengths).shape == (0,)


@examples
@given(ragged(), st.integers(0, 4))
def test_a_sequence_sums_to_the_same_bits_in_any_company(case, at):
    """Micro-batches differ between layouts and after a resume; a sum over a sequence must not."""
    rows = [[float(x) for x in torch.tensor(row)] for row in case.rows(-1, 1)]
    i = at % len(rows)
    together = sum_per_sequence(flat(rows).float(), case.lengths_S)[i]
    assert together == sum_per_sequence(flat([rows[i]]).float(), case.lengths_S[i : i + 1])[0]
