"""The distance of the policy from its reference: estimates from the sampled tokens, and the coefficient of the penalty.

Dimensions: `T` tokens of sequences end to end, `S` sequences.

For a token sampled from the policy `p`, with reference `q` and `d = log p - log q` (Schulman 2020, "Approximating KL
Divergence"):

    k1 = d                  unbiased, of either sign; E[gradient] = 0
    k2 = d^2 / 2            biased; E[gradient] = gradient of KL(p || q)
    k3 = exp(-d) - 1 + d    unbiased, never negative, of low variance; E[gradient] = gradient of KL(q || p)

So an estimate that is good as a number need not be good as a loss.

- *In the reward* the number counts. k1 is the usual one: the policy gradient of its sum over a sequence is the gradient
  of KL(p || q).
- *As a loss* the gradient counts. k2 has the gradient of KL(p || q). k3 (GRPO's) has that of the other direction. Both
  are equal near `p = q`, but k3's grows exponentially as the policy leaves a token that the reference likes. k1 as a
  loss is noise around nothing.
- *As a metric*: k3.

The expectations are over tokens of the present policy. They hold for the first update of a rollout, and nearly for the
next.

k3 alone takes the exponential of d, so it bounds d (`policy.clamped_log_ratio`). k1 and k2 keep their gradient
however far a token is. k3 can be capped too: verl (kl_penalty_forward) and ROLL (compute_approx_kl) cap it at 10. That
takes the gradient of a token with d below -2.6. TRL and the paper cap nothing, nor does mrl if `algorithm.kl_cap` is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mrl.algorithms.policy import clamped_log_ratio
from mrl.algorithms.ragged import sum_per_sequence

KL_ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d_T: d_T,
    "k2": lambda d_T: d_T.square() / 2,
    "k3": lambda d_T: torch.expm1(-clamped_log_ratio(d_T)) + clamped_log_ratio(d_T),
}
"""`algorithm.kl_estimator` -> the estimate, from `log p - log q`."""


def kl_estimate(log_probs_T: Tensor, ref_log_probs_T: Tensor, estimator: str, *, cap: float = 0.0) -> Tensor:
    """Returns [T]: KL(policy || reference) at each token. Its gradient, if any, flows to `log_probs_T`.

    It is exactly 0 if both are equal. cap: the largest value of an estimate, without gradient beyond; 0 for none.
    """
    assert log_probs_T.shape == ref_log_probs_T.shape, f"{tuple(log_probs_T.shape)}, {tuple(ref_log_probs_T.shape)}"
    estimate_T = KL_ESTIMATORS[estimator](log_probs_T - ref_log_probs_T.detach())
    return estimate_T.clamp(max=cap) if cap else estimate_T


def sequence_kl(kl_T: Tensor, mask_T: Tensor, lengths_S: Tensor) -> float:
    """Returns nats per sequence: the sum over a sequence's trained tokens, as a mean over the sequences that have
    any."""
    trained_T = mask_T != 0
    sequences = int((sum_per_sequence(trained_T.long(), lengths_S) > 0).sum())
    return float(kl_T[trained_T].double().sum()) / max(1, sequences)


class KLController:
    """Holds the coefficient of the KL penalty: fixed, or steered towards a target (Ziegler 2019, section 2.2).

        e = clip((KL - target) / target, -0.2, 0.2)        coef <- coef (1 + gain e)

    KL: of whole sequences (`sequence_kl`), in nats. target: 0 keeps the coefficient fixed. gain: per update, 0.1 in the
    paper (its code has `horizon` instead: gain = sequences / horizon).
    """

    def __init__(self, coef: float, *, target: float = 0.0, gain: float = 0.1) -> None:
        assert coef >= 0 and target >= 0 and gain >= 0, f"coef {coef}, target {target}, gain {gain}: negative"
        self.coef, self._target, self._gain = coef, target, gain

    def update(self, sequence_kl: float) -> float:
        """Returns the coefficient for the next rollout. Call it once per rollout, after its KL is known and used."""
        if self._target:
            error = min(max((sequence_kl - self._target) / self._target, -0.2), 0.2)
            self.coef *= 1 + self._gain * error
        return self.coef

    def state_dict(self) -> dict[str, float]:
        """Returns the state that a checkpoint must hold."""
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restores `state_dict`; target and gain are those of the config."""
        self.coef = float(state["coef"])
