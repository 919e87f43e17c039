"""Rewards before advantages: placement, DAPO's two devices."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from mrl.algorithms.shaping import groups_with_signal, overlong_penalty, token_rewards
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
