"""The loss functions of `mrl ppo`, as engines take them: sums over a micro-batch (docs/loss.md).

Dimensions: `T` tokens of a micro-batch end to end, `S` sequences.

Which fields a batch must carry, all [T] and aligned with its labels:

    actor    advantages; old_log_probs (without, the policy is its own old one: the only step on a rollout);
             ref_log_probs with a KL (without, none is reported); rollout_log_probs with an importance correction;
             with a teacher's distributions, its log-probs of `data.labels[:, 1:]` (`distill.TEACHER`)
    critic   returns, old_values

Metrics are means over trained tokens for every aggregation: their sums are scaled for the engine's one division. The
engine takes all log-probs at the temperature of the sampler; no function here sees logits.

`algorithm.aggregation` makes the loss of a mini-batch from losses of tokens. With the mask `m`, the loss `l` of each
token and, over the whole global mini-batch, `M` the sum of the mask and `n` the number of sequences with any of it:

    token_mean      sum m l / M                                       PPO, DAPO (Yu 2025, eq. 8)
    sequence_mean   1/n sum_i (sum_t m l / sum_t m)                   GRPO (Shao 2024, eq. 3), GSPO (Zheng 2025, eq. 5)
    fixed_length    1/n sum_i (sum_t m l / L)                         Dr. GRPO (Liu 2025, section 3.2): no length bias

DAPO's paper takes the token mean of each prompt's group and then the mean of those; its code, and this, one over all
tokens.

Each is `sum w l / denominator` with weights that depend only on the token's own sequence. A micro-batch holds whole
sequences, so loss and gradient do not depend on how the mini-batch is split.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mrl.algorithms.distill import TeacherDivergence
from mrl.algorithms.kl import kl_estimate
from mrl.algorithms.policy import OBJECTIVES, RATIOS, Clip, Correction, importance_weights
from mrl.algorithms.ragged import sum_per_sequence, to_tokens
from mrl.batch import Batch

DENOMINATORS: Mapping[str, str] = {"token_mean": "tokens", "sequence_mean": "sequences", "fixed_length": "sequences"}
"""`algorithm.aggregation` -> which of `Batch.denominators` its sum is divided by."""


def token_weights(aggregation: str, mask_T: Tensor, lengths_S: Tensor, *, fixed_length: int | None = None) -> Tensor:
    """Returns [T]: the weight of each token's loss in the sum, 0 outside the mask.

    fixed_length: `L` above, the longest response that may be sampled; read by the aggregation of its name alone.
    """
    if aggregation == "token_mean":
        return mask_T
    if aggregation == "sequence_mean":
        totals_T = to_tokens(sum_per_sequence(mask_T, lengths_S), lengths_S)
        return mask_T / totals_T.masked_fill(mask_T == 0, 1.0)
    assert aggregation == "fixed_length", f"aggregation {aggregation!r} is none of {sorted(DENOMINATORS)}"
    assert fixed_length is not None and fixed_length > 0, f"fixed_length is {fixed_length}, not a number of tokens"
    return mask_T / fixed_length


class ValueLoss(NamedTuple):
    """The critic's loss of each token."""

    loss_T: Tensor  # [T], with gradient
    clipped_T: Tensor  # [T] bool, where the clipped term is the larger and takes the gradient away


def value_loss(values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, *, clip: float = 0.0) -> ValueLoss:
    """Returns the squared error of the values, kept near the old ones if `clip` is not 0. [T] each.

        l = 1/2 max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2)

    Schulman 2017, eq. 9, has the squared error; its clip is that of the authors' code, PPO2 (openai/baselines).
    """
    assert values_T.shape == old_values_T.shape == returns_T.shape
    plain_T = (values_T - returns_T).square()
    if not clip:
        return ValueLoss(plain_T / 2, torch.zeros_like(plain_T, dtype=torch.bool))
    near_T = old_values_T + (values_T - old_values_T).clamp(-clip, clip)
    clipped_T = (near_T - returns_T).square()
    return ValueLoss(torch.maximum(plain_T, clipped_T) / 2, clipped_T > plain_T)


def explained_variance(*, returns: float, returns_squared: float, error: float, error_squared: float) -> float:
    """Returns `1 - Var(R - V) / Var(R)` from means over the same tokens: of `R`, `R^2`, `R - V`, `(R - V)^2`.

    1: the critic knows the returns; 0: no better than a constant; negative: worse. Returns that are all equal leave
    nothing to explain, and it is 0.
    """
    variance = returns_squared - returns**2
    if variance <= 1e-12 * returns_squared:  # what fp64 leaves of equal numbers
        return 0.0
    return 1.0 - (error_squared - error**2) / variance


Ctx = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Aggregated:
    """The part that both losses share: how token losses become one number (see `token_weights`)."""

    aggregation: str = "token_mean"
    fixed_length: int | None = None

    @property
    def denominator(self) -> str:
        """For `engine.set_loss_fn(loss, loss.denominator)`."""
        return DENOMINATORS[self.aggregation]

    def _sum(self, data: Batch, loss_T: Tensor) -> Tensor:
        mask_T = data.loss_mask.to(loss_T.dtype)
        weights_T = token_weights(self.aggregation, mask_T, data.lengths, fixed_length=self.fixed_length)
        return (loss_T * weights_T).sum()

    def _add_means(self, ctx: Ctx, data: Batch, quantities: Mapping[str, Tensor]) -> Ctx:
        """Returns `ctx` with a sum for each quantity [T]: the division by `denominator` makes it the mean over
        tokens."""
        scale = data.denominators[self.denominator] / (data.denominators["tokens"] or 1.0)
        mask_T = data.loss_mask.double()
        sums = {name: (x_T.detach().double() * mask_T).sum() * scale for name, x_T in quantities.items()}
        return {**ctx, "metrics": {**ctx.get("metrics", {}), **sums}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorLoss(_Aggregated):
    """`sum_t w_t (c_t l_t + kl_coef KL_t - entropy_coef H_t)`: the policy's objective, its KL penalty, an entropy
    bonus. With `distill` KL is the divergence from the teacher's distribution. It reports, as means over tokens:

        actor/ratio    r                                     actor/clip_fraction        where it was clipped
        actor/kl       KL(policy || reference), by k3        actor/approx_kl            KL(old || policy), by k3
        actor/entropy  H, where it is predicted              actor/clip_fraction_low    below 1, and _high above it
                                                             actor/importance_weight    c
                                                             actor/importance_limited   where c is not the ratio itself
                                                             actor/importance_squared   c^2
        actor/divergence    from the teacher, with `distill`     actor/teacher_tail     what it gives to other ids
    """

    objective: str = "clip"  # this and the next two: see `policy`
    ratio: str = "token"
    clip: Clip = Clip(0.2, 0.2)
    kl_coef: float = 0.0  # see `kl`; a controller's comes by `dataclasses.replace`
    kl_estimator: str = "k3"
    kl_cap: float = 0.0
    entropy_coef: float = 0.0  # other than 0, predictions hold an entropy with gradient (`ctx["entropy"]`)
    correction: Correction | None = None  # None: c = 1
    distill: TeacherDivergence | None = None
    """With it, predicted log-probs are [T, 1 + K], the first of the sampled token."""

    def __call__(self, data: Batch, predictions: Mapping[str, Tensor], ctx: Ctx) -> tuple[Tensor, Ctx]:
        log_probs = predictions["log_probs"]
        log_probs_T = _trained(log_probs if self.distill is None else log_probs[:, 0], data)
        loss_T, report = self._policy(data, log_probs_T)
        if "ref_log_probs" in data.token_fields:
            report["actor/kl"] = kl_estimate(log_probs_T.detach(), _field(data, "ref_log_probs"), "k3")
        if "entropy" in predictions:
            report["actor/entropy"] = _trained(predictions["entropy"], data)
        if self.distill is not None:
            divergence_T, tail_T = self.distill(data, log_probs[:, 1:])
            loss_T = loss_T + self.kl_coef * divergence_T
            report["actor/divergence"] = divergence_T
            report |= {"actor/teacher_tail": tail_T} if self.distill.tail else {}
        elif self.kl_coef:
            ref_T = _field(data, "ref_log_probs")
            kl_T = kl_estimate(log_probs_T, ref_T, self.kl_estimator, cap=self.kl_cap)
            loss_T = loss_T + self.kl_coef * kl_T
        if self.entropy_coef:
            loss_T = loss_T - self.entropy_coef * _differentiable_entropy(predictions, data)
        return self._sum(data, loss_T), self._add_means(ctx, data, report)

    def _policy(self, data: Batch, log_probs_T: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns `c_t l_t`, and its metrics."""
        mask_T, lengths_S = data.loss_mask, data.lengths
        old_T = _field(data, "old_log_probs") if "old_log_probs" in data.token_fields else log_probs_T.detach()
        ratio_T = RATIOS[self.ratio](log_probs_T, old_T, mask_T, lengths_S)
        policy = OBJECTIVES[self.objective](ratio_T, log_probs_T, _field(data, "advantages"), self.clip)
        report = {
            "actor/ratio": ratio_T,
            "actor/clip_fraction": policy.clipped_T,
            "actor/clip_fraction_low": policy.clipped_T & (ratio_T < 1),
            "actor/clip_fraction_high": policy.clipped_T & (ratio_T > 1),
            "actor/approx_kl": kl_estimate(old_T, log_probs_T, "k3"),
        }
        if self.correction is None:
            return policy.loss_T, report
        rollout_T = _field(data, "rollout_log_probs")
        weights = importance_weights(old_T, rollout_T, mask_T, lengths_S, correction=self.correction)
        report |= {"actor/importance_weight": weights.weight_T, "actor/importance_limited": weights.limited_T}
        report["actor/importance_squared"] = weights.weight_T.square()
        return policy.loss_T * weights.weight_T, report


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticLoss(_Aggregated):
    """`sum_t w_t l_t` of `value_loss`, aggregated as the actor's.

    Reports, as means over tokens: critic/value, critic/clip_fraction, and what `explained_variance` makes one of:
    critic/returns, critic/returns_squared, critic/error, critic/error_squared.
    """

    value_clip: float = 0.0  # 0 for none

    def __call__(self, data: Batch, predictions: Mapping[str, Tensor], ctx: Ctx) -> tuple[Tensor, Ctx]:
        values_T, returns_T = _trained(predictions["values"], data), _field(data, "returns")
        value = value_loss(values_T, _field(data, "old_values"), returns_T, clip=self.value_clip)
        error_T = (returns_T - values_T.detach()).double()
        report = {
            "critic/value": values_T,
            "critic/clip_fraction": value.clipped_T,
            "critic/returns": returns_T,
            "critic/returns_squared": returns_T.double().square(),
            "critic/error": error_T,
            "critic/error_squared": error_T.square(),
        }
        return self._sum(data, value.loss_T), self._add_means(ctx, data, report)


def _trained(values_T: Tensor, data: Batch) -> Tensor:
    """Returns [T] with 0 where nothing trains. Neither a value there nor its gradient gets through, finite or not."""
    assert values_T.shape == data.loss_mask.shape, f"{tuple(values_T.shape)}, mask {tuple(data.loss_mask.shape)}"
    return values_T.masked_fill(data.loss_mask == 0, 0.0)


def _field(data: Batch, name: str) -> Tensor:
    assert name in data.token_fields, f"the batch has the token fields {sorted(data.token_fields)}, not {name!r}"
    return _trained(data.token_fields[name], data)


def _differentiable_entropy(predictions: Mapping[str, Tensor], data: Batch) -> Tensor:
    """Returns the entropy, which must have a gradient: without one a bonus changes the shown loss alone."""
    assert "entropy" in predictions, 'an entropy bonus needs ctx["entropy"] = "differentiable"'
    entropy_T = predictions["entropy"]
    with_gradient = entropy_T.requires_grad or not predictions["log_probs"].requires_grad
    assert with_gradient, 'the entropy has no gradient; an entropy bonus needs ctx["entropy"] = "differentiable"'
    return _trained(entropy_T, data)
