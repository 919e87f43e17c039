"""Losses that are plain sums over positions, by name, for clients of `mrl serve`.

Dimensions: `T` tokens of a micro-batch end to end, `K` labels of a token. `lp` is the log-prob of a label, `q` the one
that the sampler gave, `A` the advantage, `r = exp(lp - q)`, `sg` takes the gradient off.

    cross_entropy          -sum w lp
    importance_sampling    -sum r A
    ppo                    -sum min(r A, clip(r, low, high) A)              Schulman et al., 2017
    cispo                  -sum sg(clip(r, low, high)) lp A                 MiniMax, 2025
    dro                    -sum (lp A - beta/2 (lp - q)^2), no penalty where q is 0
                                                                            Richemond et al., 2024
    gspo                   as ppo with r = s exp(lp - sg(lp)), s = exp(mean over the sequence's mask of lp - q)
                                                                            Zheng et al., 2025, section 5.3 (GSPO-token)

Nothing divides: who wants a mean scales the weights or the advantages. Positions of a prompt have `A` 0 and `q` 0. The
thresholds are ratios themselves, not distances from 1. Names, inputs and options are those of the tinker client's
documentation; `Loss.options` says if this differs from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mrl.algorithms.policy import clamped_log_ratio
from mrl.algorithms.ragged import sum_per_sequence, to_tokens
from mrl.batch import Batch

Fields = Mapping[str, Tensor]
Options = Mapping[str, float]

DENOMINATOR = "one"
"""Of a batch whose sums are not to be divided: `batch.denominators["one"]` is 1."""


@dataclasses.dataclass(frozen=True)
class Loss:
    """One of the losses: what each position must bring, what may be set, and each position's share."""

    fields: tuple[str, ...]  # of a position, all float
    options: Mapping[str, float]  # name -> its value where the client gives none
    of: Callable[[Tensor, Fields, Options, Tensor], Tensor]
    """(log-probs [T] or [T, K], fields, options, lengths [S]) -> [T] or [T, K], to be added up."""


def _cross_entropy(lp: Tensor, fields: Fields, options: Options, lengths: Tensor) -> Tensor:
    return -fields["weights"] * lp


def _importance_sampling(lp: Tensor, fields: Fields, options: Options, lengths: Tensor) -> Tensor:
    return -_ratio(lp, fields) * fields["advantages"]


def _ppo(lp: Tensor, fields: Fields, options: Options, lengths: Tensor) -> Tensor:
    return _clipped(_ratio(lp, fields), fields["advantages"], options)


def _cispo(lp: Tensor, fields: Fields, options: Options, lengths: Tensor) -> Tensor:
    return -_clip(_ratio(lp, fields), options).detach() * lp * fields["advantages"]


def _dro(lp: Tensor, fields: Fields, options: Options, lengths: Tensor) -> Tensor:
    # A prompt's q is 0, which is no policy's: a penalty would pull its tokens to certainty. A sampled token with q 0
    # was certain, and its lp is near 0 too.
    penalty = (lp - fields["logprobs"]).square() * (options["beta"] / 2)
    return -(lp * fields["advantages"] - penalty.masked_fill(fields["logprobs"] == 0, 0.0))


def _gspo(lp: Tensor, fields: Fields, options: Options, lengths: Tensor) -> Tensor:
    mask = fields["sequence_ratio_mask"]
    counts = sum_per_sequence(mask, lengths).clamp(min=1.0)
    mean = sum_per_sequence((lp.detach() - fields["logprobs"]).masked_fill(mask == 0, 0.0) * mask, lengths) / counts
    ratio = to_tokens(clamped_log_ratio(mean).exp(), lengths) * (lp - lp.detach()).exp()
    return _clipped(ratio, fields["advantages"], options)


def _ratio(lp: Tensor, fields: Fields) -> Tensor:
    return clamped_log_ratio(lp - fields["logprobs"]).exp()


def _clip(ratio: Tensor, options: Options) -> Tensor:
    return ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])


def _clipped(ratio: Tensor, advantages: Tensor, options: Options) -> Tensor:
    return -torch.minimum(ratio * advantages, _clip(ratio, options) * advantages)


_SAMPLER_FIELDS = ("logprobs", "advantages")
_NEAR_1 = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}

LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(("weights",), {}, _cross_entropy),
    "importance_sampling": Loss(_SAMPLER_FIELDS, {}, _importance_sampling),
    "ppo": Loss(_SAMPLER_FIELDS, _NEAR_1, _ppo),
    "cispo": Loss(_SAMPLER_FIELDS, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}, _cispo),
    "dro": Loss(_SAMPLER_FIELDS, {"beta": 0.05}, _dro),
    "gspo": Loss((*_SAMPLER_FIELDS, "sequence_ratio_mask"), _NEAR_1, _gspo),
}


@dataclasses.dataclass(frozen=True)
class SummedLoss:
    """A loss of `LOSSES` as engines take it. The fields are token fields of the batch, [T] or [T, K] as its labels."""

    name: str
    options: Options

    def __call__(
        self, data: Batch, predictions: Mapping[str, Tensor], ctx: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """Returns the sum over all positions, whatever the loss mask says: it selects nothing here."""
        each = LOSSES[self.name].of(predictions["log_probs"], data.token_fields, self.options, data.lengths)
        return each.sum(), ctx
