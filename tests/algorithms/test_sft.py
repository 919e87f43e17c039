"""The SFT loss is a sum that nothing outside the mask touches."""

from __future__ import annotations

import torch

from mrl.algorithms.sft import sft_loss
from mrl.batch import make_batch


def test_sum_of_weighted_negative_log_probs():
    batch = make_batch([[5, 6, 7], [8, 9]], [[1, 0, 1], [1, 0.5]])
    log_probs = torch.tensor([-1.0, -2.0, -4.0], requires_grad=True)
    loss, ctx = sft_loss(batch, {"log_probs": log_probs}, {"kept": 1})
    loss.backward()
    assert loss.item() == 2.0 + 0.5 * 4.0 and ctx == {"kept": 1}
    assert log_probs.grad.tolist() == [0.0, -1.0, -0.5]


def test_a_label_that_does_not_train_adds_nothing_even_where_it_is_impossible():
    batch = make_batch([[5, 6, 7]], [[0, 0, 1]])
    log_probs = torch.tensor([-torch.inf, -2.0], requires_grad=True)
    loss, _ = sft_loss(batch, {"log_probs": log_probs}, {})
    loss.backward()
    assert loss.item() == 2.0 and log_probs.grad.tolist() == [0.0, -1.0]
