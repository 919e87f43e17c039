"""The losses that a check takes its gradients of, in plain torch, are those that engines are given: values and slopes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from mrl.algorithms.preference import LossSettings, PreferenceLoss, with_reference
from mrl.algorithms.scores import ScoreLoss
from mrl.batch import Batch
from mrl.check.steps import PreferenceOracle, ScoreOracle
from mrl.config.preference_losses import ROWS
from mrl.data.preferences import Answer, Preference, batch_of
from mrl.data.scored import ScoredRow, ScoredSequence, scored_batch

LENGTHS, TRAINED = (5, 7, 4, 9, 6, 8), (2, 3, 1, 4, 2, 2)
WEIGHTS = (1.0, 0.25, 3.0)


def same(oracle: Callable, group: int, batch: Batch, fields: Sequence[dict[str, float | Tensor]], engine: Callable):
    """engine: (values [T]) -> the sum that an engine divides by the batch's units."""
    values_T = -3 * torch.rand(batch.num_tokens, generator=torch.Generator().manual_seed(1))
    ours_T, theirs_T = (values_T.clone().requires_grad_() for _ in range(2))
    parts, masks = theirs_T.split(batch.lengths.tolist()), batch.loss_mask.split(batch.lengths.tolist())
    fields = [{name: torch.as_tensor(value) for name, value in of_one.items()} for of_one in fields]
    total = sum(
        oracle(parts[i : i + group], masks[i : i + group], fields[i : i + group]) for i in range(0, len(parts), group)
    )
    total.backward()
    of_engine = engine(ours_T) / batch.denominators["units"]
    of_engine.backward()
    assert float(total.detach()) == pytest.approx(float(of_engine.detach()), rel=1e-6)
    assert torch.allclose(ours_T.grad, theirs_T.grad, rtol=1e-5, atol=1e-9) and ours_T.grad.any()


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        *((name, {}) for name in ROWS),
        ("dpo", {"label_smoothing": 0.2, "length_normalized": True, "sft_weight": 0.5}),
        ("dpo", {"reference_free": True}),
        ("ipo", {"length_normalized": True, "beta": 0.3}),
        ("kto", {"desirable_weight": 1.5, "undesirable_weight": 0.5, "sft_weight": 0.5}),
        ("simpo", {"gamma": 0.3, "sft_weight": 2.0}),
    ],
)
def test_losses_on_preferences(name, changed):
    by, group = {**ROWS[name], **changed}, 1 if name == "kto" else 2
    answers = [
        Answer(list(range(n)), [0] * (n - count) + [1] * count, i % 2 == 0)
        for i, (n, count) in enumerate(zip(LENGTHS, TRAINED, strict=True))
    ]
    rows = [Preference((answers[2 * i], answers[2 * i + 1]), weight) for i, weight in enumerate(WEIGHTS)]
    refs = [-2.0, -4.0, -1.0, -7.0, -3.0, -2.5]
    batch = with_reference(batch_of(rows, group=group), torch.tensor(refs, dtype=torch.float64))
    fields = [
        {
            "weight": WEIGHTS[i // 2], "chosen": i % 2 == 0, "reference": refs[i], "kl": 0.7,
            "units": sum(WEIGHTS) * (2 // group), "chosen_tokens": 2 * 1.0 + 1 * 0.25 + 2 * 3.0,
        }
        for i in range(6)
    ]  # fmt: skip
    loss = PreferenceLoss(name, LossSettings(**by))
    same(PreferenceOracle(name, by), group, batch, fields, lambda v: loss(batch, {"log_probs": v}, {"kl": 0.7})[0])


@pytest.mark.parametrize("name", ["bradley_terry", "regression", "steps"])
def test_losses_on_scores(name):
    group = 2 if name == "bradley_terry" else 1
    places = [(n - 3, n - 1) if name == "steps" else (n - 1,) for n in LENGTHS]
    targets = [(0.0, 0.3) if name == "steps" else (i - 1.5,) for i in range(6)]
    sequences = [ScoredSequence(list(range(n)), at, of) for n, at, of in zip(LENGTHS, places, targets, strict=True)]
    rows = [
        ScoredRow(tuple(sequences[i : i + group]), margin=0.1 * i if group == 2 else 0.0, weight=1 + i / 2)
        for i in range(0, 6, group)
    ]
    batch = scored_batch(rows, group=group)
    fields = [
        {
            "targets": torch.zeros(n).index_put((torch.tensor(at),), torch.tensor(of)), "margin": rows[i // group].margin,
            "weight": rows[i // group].weight, "units": sum(row.weight * len(s.places) for row in rows for s in row.sequences) / group,
        }
        for i, (n, at, of) in enumerate(zip(LENGTHS, places, targets, strict=True))
    ]  # fmt: skip
    loss = ScoreLoss(name, 0.05 if group == 2 else 0.0)
    same(ScoreOracle(name, loss.centering), group, batch, fields, lambda v: loss(batch, {"values": v}, {})[0])
