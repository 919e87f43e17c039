"""Losses on preferences, as engines take them: sums over the pairs or answers of a micro-batch (docs/loss.md).

Dimensions: `T` tokens of a micro-batch end to end, `S` sequences, `N` units: pairs, or single answers of kto.

A prompt `x` has a chosen answer `w` and a rejected one `l`. `lp(y)` is the policy's log-prob of an answer (the sum over
its tokens), `mp(y)` is `lp(y)` over the number of tokens. With `r(y) = lp(y) - lp_ref(y)` and the logistic function
`s`:

    dpo     -(1 - e) log s(beta (r(w) - r(l))) - e log s(-beta (r(w) - r(l)))
                            Rafailov et al., 2023 (arXiv 2305.18290), eq. 7; e: Mitchell, "A note on DPO with noisy
                            preferences and relationship to IPO", 2023 (cDPO). Reference-free: lp for r.
    ipo     (r(w) - r(l) - 1 / (2 beta))^2
                            Azar et al., 2023 (arXiv 2310.12036), eq. 17; beta is its tau
    kto     d (1 - s(beta (r(y) - z))) of a good answer, u (1 - s(beta (z - r(y)))) of a bad one
                            Ethayarajh et al., 2024 (arXiv 2402.01306), L_KTO; z below
    orpo    -beta log s(log odds(w) - log odds(l)), log odds(y) = mp(y) - log(1 - exp(mp(y)))
                            Hong et al., 2024 (arXiv 2403.07691), eq. 7; with the SFT term, eq. 6; beta is its lambda
    simpo   -log s(beta (mp(w) - mp(l)) - gamma)
                            Meng et al., 2024 (arXiv 2405.14734), eq. 6

Each is a mean over the units of the global mini-batch, weighted by their rows' weights. `sft_weight` times the mean
negative log-likelihood of all tokens of chosen answers is added. Length-normalized dpo and ipo have `mp(y) - mp_ref(y)`
for `r(y)`.

kto's `z` estimates the KL from the reference. It is the mean of `r` over answers to other prompts in the global
mini-batch, not weighted. It is at least 0 and has no gradient (section 4 of the paper). The policy before the step
makes it, and it comes as `ctx["kl"]`: so it depends neither on ranks nor on micro-batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mrl.algorithms.ragged import sum_per_sequence
from mrl.batch import Batch

Ctx = dict[str, Any]

DENOMINATOR = "units"
"""Of `Batch.denominators`, what the loss is divided by: pairs, or answers of kto. The batch also has the counts
"chosen" and "rejected" of its answers, "chosen_tokens", and "pairs" of its rows that are pairs."""

CHOSEN, REFERENCE, WEIGHT, OF_PAIR = "chosen", "reference", "weight", "of_pair"
"""Sequence fields [S]: 1 for a chosen or good answer, else 0; the reference's log-prob of the answer; where not all are
1, what the answer's row counts; where not all are, 1 for an answer of a pair, else 0. Counts in denominators are sums
of these weights."""


@dataclasses.dataclass(frozen=True)
class Answers:
    """The answers of a micro-batch, a number for each."""

    log_probs_S: Tensor  # float64, of the policy, with a gradient
    reference_S: Tensor  # float64; 0 where there is none
    tokens_S: Tensor  # float64, its trained tokens
    chosen_S: Tensor  # bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossSettings:
    """The settings of the losses. Each loss reads its own fields; see the module."""

    beta: float
    label_smoothing: float = 0.0
    reference_free: bool = False
    length_normalized: bool = False
    gamma: float = 0.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    sft_weight: float = 0.0


def _log_ratios(of: Answers, by: LossSettings) -> Tensor:
    reference_S = torch.zeros_like(of.reference_S) if by.reference_free else of.reference_S
    ratios_S = of.log_probs_S - reference_S
    return ratios_S / of.tokens_S if by.length_normalized else ratios_S


def _mean_log_probs(of: Answers, by: LossSettings) -> Tensor:
    return of.log_probs_S / of.tokens_S


def _log_odds(of: Answers, by: LossSettings) -> Tensor:
    means_S = _mean_log_probs(of, by)
    # an answer that is certain has infinite odds; 1 - exp(-eps) of float64 is the nearest that has a gradient
    return means_S - torch.log(-torch.expm1(means_S.clamp(max=-torch.finfo(torch.float64).eps)))


def _dpo(margins_N: Tensor, by: LossSettings) -> Tensor:
    sure = -logsigmoid(by.beta * margins_N)
    return (1 - by.label_smoothing) * sure - by.label_smoothing * logsigmoid(-by.beta * margins_N)


def _ipo(margins_N: Tensor, by: LossSettings) -> Tensor:
    return (margins_N - 1 / (2 * by.beta)).square()


def _orpo(margins_N: Tensor, by: LossSettings) -> Tensor:
    return -by.beta * logsigmoid(margins_N)


def _simpo(margins_N: Tensor, by: LossSettings) -> Tensor:
    return -logsigmoid(by.beta * margins_N - by.gamma)


def _kto(ratios_S: Tensor, chosen_S: Tensor, kl: float, by: LossSettings) -> Tensor:
    good_S = by.desirable_weight * (1 - torch.sigmoid(by.beta * (ratios_S - kl)))
    bad_S = by.undesirable_weight * (1 - torch.sigmoid(by.beta * (kl - ratios_S)))
    return torch.where(chosen_S, good_S, bad_S)


@dataclasses.dataclass(frozen=True)
class Loss:
    """One of the losses: what it measures of an answer, and what it makes of a pair's difference of that."""

    score: Callable[[Answers, LossSettings], Tensor]  # [S]
    of_margin: Callable[[Tensor, LossSettings], Tensor] | None
    """Of chosen less rejected [N]; None: of single answers, kto."""
    reward: Callable[[Answers, LossSettings], Tensor]  # [S], what metrics call the reward, before the factor beta


LOSSES: Mapping[str, Loss] = {
    "dpo": Loss(_log_ratios, _dpo, _log_ratios),
    "ipo": Loss(_log_ratios, _ipo, _log_ratios),
    "kto": Loss(_log_ratios, None, _log_ratios),
    "orpo": Loss(_log_odds, _orpo, _mean_log_probs),
    "simpo": Loss(_mean_log_probs, _simpo, _mean_log_probs),
}

METRIC_DENOMINATORS: Mapping[str, str] = {
    "rewards/chosen": "chosen",
    "rewards/rejected": "rejected",
    "rewards/margin": "pairs",
    "rewards/accuracy": "pairs",
    "logps/chosen": "chosen",
    "logps/rejected": "rejected",
    "nll/chosen": "chosen_tokens",
    "reference/kl": "units",
}
"""Metric -> the denominator whose mean it is. Margin, accuracy and the reference's KL are of pairs, the last where
there is a reference. kto takes the answers of a pair apart. It has their margin all the same, as a sum of differences
is a difference of sums, and no accuracy, which compares the two."""


@dataclasses.dataclass(frozen=True)
class PreferenceLoss:
    """Computes a loss of `LOSSES` as engines take it, divided by `DENOMINATOR`.

    Sequences of a pair are neighbours, the chosen one first. Metrics are those of `METRIC_DENOMINATORS`; the engine's
    one division makes them means.
    """

    name: str
    numbers: LossSettings

    def __call__(self, data: Batch, predictions: Mapping[str, Tensor], ctx: Ctx) -> tuple[Tensor, Ctx]:
        loss, of, by = LOSSES[self.name], _answers(data, predictions["log_probs"]), self.numbers
        scores_S, rewards_S = loss.score(of, by), by.beta * loss.reward(of, by).detach()
        weights_S = answer_weights(data)
        if loss.of_margin is None:
            total = (weights_S * _kto(scores_S, of.chosen_S, float(ctx["kl"]), by)).sum()
            signs_S = torch.where(of.chosen_S, 1.0, -1.0) * is_paired_S(data)
            sums = {"rewards/margin": (weights_S * signs_S * rewards_S).sum()}
        else:
            weights_N, margins_N = weights_S[0::2], rewards_S[0::2] - rewards_S[1::2]
            total = (weights_N * loss.of_margin(scores_S[0::2] - scores_S[1::2], by)).sum()
            right_N = (margins_N > 0).double()
            sums = {"rewards/margin": (weights_N * margins_N).sum(), "rewards/accuracy": (weights_N * right_N).sum()}
            if loss.score is _log_ratios and not by.reference_free:
                behind_S = of.reference_S - of.log_probs_S.detach()
                sums["reference/kl"] = (weights_S * behind_S).sum() / 2  # of both answers of a pair
        log_probs_S, rewards_S = weights_S * of.log_probs_S, weights_S * rewards_S
        chosen = log_probs_S[of.chosen_S].sum()
        if by.sft_weight:
            total = total - by.sft_weight * chosen * _scale(data, "chosen_tokens")
        sums |= {
            "rewards/chosen": rewards_S[of.chosen_S].sum(),
            "rewards/rejected": rewards_S[~of.chosen_S].sum(),
            "logps/chosen": chosen.detach(),
            "logps/rejected": log_probs_S[~of.chosen_S].detach().sum(),
            "nll/chosen": -chosen.detach(),
        }
        means = {name: value * _scale(data, METRIC_DENOMINATORS[name]) for name, value in sums.items()}
        return total, {**ctx, "metrics": {**ctx.get("metrics", {}), **means}}


def _answers(data: Batch, log_probs_T: Tensor) -> Answers:
    mask_T = data.loss_mask
    assert log_probs_T.shape == mask_T.shape, f"log_probs {tuple(log_probs_T.shape)}, mask {tuple(mask_T.shape)}"
    sums_S = answer_log_probs(data, log_probs_T)
    reference_S = data.sequence_fields.get(REFERENCE, torch.zeros_like(sums_S)).double()
    tokens_S = sum_per_sequence((mask_T != 0).double(), data.lengths)
    return Answers(sums_S, reference_S, tokens_S, data.sequence_fields[CHOSEN].bool())


def answer_weights(data: Batch) -> Tensor:
    """Returns [S] float64: the weight of each answer."""
    return _field_or_ones(data, WEIGHT)


def is_paired_S(data: Batch) -> Tensor:
    """Returns [S] float64: 1 for each answer of a pair, 0 for a single one."""
    return _field_or_ones(data, OF_PAIR)


def _field_or_ones(data: Batch, name: str) -> Tensor:
    return data.sequence_fields.get(name, torch.ones_like(data.lengths)).double()


def answer_log_probs(data: Batch, log_probs_T: Tensor) -> Tensor:
    """Returns [S] float64: the log-prob of each sequence's trained tokens together."""
    trained_T = log_probs_T.masked_fill(data.loss_mask == 0, 0.0).double()
    return sum_per_sequence(trained_T, data.lengths)


def _scale(data: Batch, denominator: str) -> float:
    """Returns the factor of a sum for `denominator`: the engine divides by `DENOMINATOR`."""
    return data.denominators[DENOMINATOR] / (data.denominators[denominator] or 1.0)


def with_reference(batch: Batch, log_probs_S: Tensor) -> Batch:
    """Returns the batch with the reference's log-probs of its answers."""
    return dataclasses.replace(batch, sequence_fields={**batch.sequence_fields, REFERENCE: log_probs_S})


def kl_estimate(log_probs_S: Tensor, reference_S: Tensor) -> float:
    """Returns kto's `z` from the log-probs [S] of answers to other prompts, of policy and reference."""
    return max(0.0, float((log_probs_S.double() - reference_S.double()).mean()))
