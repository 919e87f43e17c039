"""Checks of the first iteration: what is equal in theory must be equal here before anything is trained on it.

Each raises TrainingError naming what differs, by how much, and what to look at. A sampler beside the trainer's own
engine and a reference with other weights are not checked, because nothing is promised of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.algorithms.advantages import ESTIMATORS
from mrl.algorithms.distill import teacher_numbers
from mrl.algorithms.ragged import sum_per_sequence, to_tokens
from mrl.algorithms.recipes import Recipe
from mrl.batch import Batch
from mrl.errors import TrainingError

FP32_GAP, FP32_LARGEST = 1e-5, 1e-4
"""How far the log-probs of sampler and trainer may be apart, in the mean and for a token, in nats: generation adds up
in another order. Of an unlikely token (below -1 nat), whose log-prob is a difference of two large numbers, the bound is
relative; 30 layers make 1.5e-5 of it. What is wrong (a temperature, a mask, older weights) makes more than 1e-3."""

BF16_MEAN_GAP = 0.05
"""Largest mean difference in bfloat16, whose logits of size 16 are rounded to 1/16."""


def check_rollout(batch: Batch, *, dtype: str) -> None:
    """The sampler's log-probs are the trainer's: same weights, temperature, positions and mask."""
    gap_T = gaps(batch)
    if not gap_T.numel():
        return
    found = [(float(gap_T.mean()), FP32_GAP if dtype == "float32" else BF16_MEAN_GAP, "in the mean by")]
    if dtype == "float32":
        old_T = batch.token_fields["old_log_probs"][batch.loss_mask != 0].double()
        found.append((float((gap_T / old_T.abs().clamp(min=1.0)).max()), FP32_LARGEST, "by up to"))
    for value, limit, what in found:
        if not value <= limit:
            raise TrainingError(
                f"the first rollout's log-probs differ from the trainer's {what} {value:.3g} nats ({limit:g} is "
                "allowed). The policy that samples is not the one that trains: report this, or set train.guards to "
                "false to go on"
            )


def gaps(batch: Batch) -> Tensor:
    """[trained tokens] fp64: |log p of the sampler - log p of the trainer|."""
    fields, trained_T = batch.token_fields, batch.loss_mask != 0
    return (fields["rollout_log_probs"].double() - fields["old_log_probs"].double())[trained_T].abs()


def check_reference(batch: Batch, *, same_layout: bool, dtype: str) -> None:
    """The reference is the actor before its first update, so their KL is 0; exactly, where both compute alike.

    Sequences of other teachers, whose weights are others, are left out.
    """
    fields, of_T = batch.token_fields, to_tokens(teacher_numbers(batch), batch.lengths)
    own_T = (batch.loss_mask != 0) & (of_T == 0)
    differences = (fields["old_log_probs"].double() - fields["ref_log_probs"].double())[own_T].abs()
    if not differences.numel():
        return
    largest, mean = float(differences.max()), float(differences.mean())
    limit, value = (
        (0.0, largest) if same_layout else (FP32_GAP, largest) if dtype == "float32" else (BF16_MEAN_GAP, mean)
    )
    if not value <= limit:
        raise TrainingError(
            f"the reference's log-probs differ from the actor's by {value:.3g} nats before the first update ({limit:g} "
            "is allowed). Both have the same model: report this, or set train.guards to false to go on"
        )


def check_ratios(predicted_T: Tensor, batch: Batch) -> None:
    """The first update's forward gives the log-probs that were computed before it: every ratio is exactly 1."""
    trained_T = batch.loss_mask != 0
    old_T = batch.token_fields["old_log_probs"]
    differing = (predicted_T.to(old_T.device).float() != old_T) & trained_T
    if bool(differing.any()):
        largest = float((predicted_T.to(old_T.device).double() - old_T.double())[trained_T].abs().max())
        raise TrainingError(
            f"before the first update {int(differing.sum())} of {int(trained_T.sum())} ratios are not 1 (log-probs "
            f"differ by up to {largest:.3g}). The training forward is another one than the forward for old log-probs. "
            "Set a dropout of config.json to 0; else report this, or set train.guards to false to go on"
        )


def check_groups(batch: Batch, scores_S: Tensor, recipe: Recipe) -> None:
    """Within a group, advantages add up to zero where they are differences from its mean.

    scores_S: only for the message. Whitened advantages have the rollout's mean taken away, so the rollout's sum is
    zero.
    """
    advantages_T, mask_T, lengths_S = batch.token_fields["advantages"].double(), batch.loss_mask, batch.lengths
    if recipe.whiten:
        total, size = float(advantages_T[mask_T != 0].sum()), float(advantages_T.abs().sum())
        where = "of the rollout"
    elif ESTIMATORS[recipe.advantage].needs == "groups_S":
        counts_S = sum_per_sequence((mask_T != 0).double(), lengths_S)
        per_sequence_S = sum_per_sequence(advantages_T, lengths_S) / counts_S.clamp(min=1)
        groups_S = batch.sequence_fields["groups"]
        _, group_S = groups_S.unique(return_inverse=True)
        totals = torch.zeros(int(group_S.max()) + 1, dtype=torch.float64).index_add_(0, group_S, per_sequence_S)
        worst = int(totals.abs().argmax())
        total, size = float(totals[worst]), float(per_sequence_S[group_S == worst].abs().sum())
        where = f"of a group with the rewards {[round(r, 4) for r in scores_S[group_S == worst].tolist()]}"
    else:
        return
    if abs(total) > 1e-5 * max(size, 1e-3):  # they are kept in fp32
        raise TrainingError(f"the advantages {where} add up to {total:.3g}, not to 0; report this")
