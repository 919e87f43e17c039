"""Losses on the scores of a reward model, as engines take them: sums over a micro-batch (docs/loss.md).

Dimensions: `T` tokens of a micro-batch end to end, `N` scores that are read of it, in the order of their tokens.

With the score `r(y)` of an answer, read at its end, and the logistic function `s`:

    bradley_terry   -log s(r(w) - r(l) - m) + c (r(w) + r(l))^2, of a chosen answer w and a rejected one l
                            Bradley and Terry, 1952; Ouyang et al., 2022 (arXiv 2203.02155), eq. 1, of one pair for each
                            prompt. Margin m, 0 where a row has none: Touvron et al., 2023 (arXiv 2307.09288), eq. 2.
                            Centering c: Eisenstein et al., 2023 (arXiv 2312.09244)
    regression      (r(y) - g)^2, of an answer of grade g
    steps           -p log s(r(k)) - (1 - p) log s(-r(k)), of each step k with the label p
                            a process reward model: Lightman et al., 2023 (arXiv 2305.20050); the cross-entropy, of hard
                            labels and of shares of roll-outs that succeed: Wang et al., 2023 (arXiv 2312.08935)

Each is a mean over the pairs, answers or steps of the global mini-batch, weighted by their rows' weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from mrl.algorithms.preference import answer_weights
from mrl.algorithms.ragged import to_tokens
from mrl.batch import Batch

Ctx = dict[str, Any]
Sums = dict[str, Tensor]

DENOMINATOR = "units"
"""Of `Batch.denominators`, what the loss and all metrics are divided by: pairs, answers or steps, each counted with its
row's weight (`mrl.algorithms.preference.WEIGHT`)."""

TARGETS, MARGIN = "targets", "margin"
"""A token field [T], the grade or label of the score that is read there; a sequence field [S], the margin of a pair, at
both of its sequences."""

METRICS: Mapping[str, tuple[str, ...]] = {
    "bradley_terry": ("rewards/chosen", "rewards/rejected", "rewards/margin", "rewards/accuracy"),
    "regression": ("rewards/mean", "rewards/error"),
    "steps": ("steps/accuracy", "steps/right"),
}
"""Loss -> its metrics."""


@dataclasses.dataclass(frozen=True)
class ScoreLoss:
    """A loss on scores as engines take it, divided by `DENOMINATOR`, and its metrics.

    A score is read of each token whose label has a loss mask. Sequences of a pair are neighbours, the chosen one first.
    centering: `c` of bradley_terry.
    """

    name: str
    centering: float = 0.0

    def __call__(self, data: Batch, predictions: Mapping[str, Tensor], ctx: Ctx) -> tuple[Tensor, Ctx]:
        values_T, read_T = predictions["values"], data.loss_mask != 0
        assert values_T.shape == read_T.shape, f"values {tuple(values_T.shape)}, mask {tuple(read_T.shape)}"
        weights_N = to_tokens(answer_weights(data), data.lengths)[read_T]
        total, sums = _LOSSES[self.name](self, data, values_T[read_T].double(), read_T, weights_N)
        return total, {**ctx, "metrics": {**ctx.get("metrics", {}), **sums}}

    def _bradley_terry(self, data: Batch, scores_N: Tensor, read_T: Tensor, weights_N: Tensor) -> tuple[Tensor, Sums]:
        chosen, rejected, weights = scores_N[0::2], scores_N[1::2], weights_N[0::2]
        margins = chosen - rejected
        total = -(weights * logsigmoid(margins - data.sequence_fields[MARGIN][0::2].double())).sum()
        total = total + self.centering * (weights * (chosen + rejected).square()).sum()
        margins = margins.detach()
        return total, {
            "rewards/chosen": (weights * chosen.detach()).sum(),
            "rewards/rejected": (weights * rejected.detach()).sum(),
            "rewards/margin": (weights * margins).sum(),
            "rewards/accuracy": (weights * (margins > 0)).sum(),
        }

    def _regression(self, data: Batch, scores_N: Tensor, read_T: Tensor, weights_N: Tensor) -> tuple[Tensor, Sums]:
        errors_N = scores_N - data.token_fields[TARGETS][read_T].double()
        return (weights_N * errors_N.square()).sum(), {
            "rewards/mean": (weights_N * scores_N.detach()).sum(),
            "rewards/error": (weights_N * errors_N.detach().abs()).sum(),
        }

    def _steps(self, data: Batch, scores_N: Tensor, read_T: Tensor, weights_N: Tensor) -> tuple[Tensor, Sums]:
        labels_N = data.token_fields[TARGETS][read_T].double()
        right_N = scores_N.detach() > 0
        return binary_cross_entropy_with_logits(scores_N, labels_N, weight=weights_N, reduction="sum"), {
            "steps/accuracy": (weights_N * (right_N == (labels_N > 0.5))).sum(),
            "steps/right": (weights_N * right_N).sum(),
        }


_LOSSES: Mapping[str, Callable[[ScoreLoss, Batch, Tensor, Tensor, Tensor], tuple[Tensor, Sums]]] = {
    "bradley_terry": ScoreLoss._bradley_terry,
    "regression": ScoreLoss._regression,
    "steps": ScoreLoss._steps,
}
