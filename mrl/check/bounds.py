"""Bounds how far two right computations of one step may be apart, with reasons."""

from __future__ import annotations

import dataclasses

from torch import Tensor

UNSURE = 0.02
"""Mean of 1 - p over labels, below which bounds of gradients grow."""


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Holds the errors that rounding may cause in right numbers."""

    loss: float  # relative where the loss is above 1, else absolute: it is a mean of log-probs
    grad_norm: float  # relative
    log_probs: float  # the largest difference
    gradients: float  # relative L2 of a tensor
    weights: float  # relative L2 of what a step makes of a tensor
    router: float  # by which a router's scores of two experts may change, relative to their size
    most: float  # up to which those of gradients and their norm grow; gradients of zeros are off by 1
    why: str
    certain: bool = False  # whether rounding alone may change gradients by more than `most`

    def given(self, log_probs: Tensor) -> Bounds:
        """Returns the bounds for a model with these log-probs [T] of labels, 0 at labels that do not train.

        The gradient of a label's log-prob is 1 - p, which fp32 rounds by 1e-7. The relative error is larger if a model
        is nearly certain. A bound above `most` would let faults pass, so gradients then decide nothing.
        """
        unsure = float((1 - log_probs[log_probs != 0].double().exp()).mean()) if (log_probs != 0).any() else 1.0
        times = max(1.0, UNSURE / max(unsure, 1e-6))
        return dataclasses.replace(
            self, gradients=min(times * self.gradients, self.most), grad_norm=min(times * self.grad_norm, self.most),
            certain=times * self.gradients > self.most,
        )  # fmt: skip

    def __str__(self) -> str:
        numbers = (
            f"loss {self.loss:g}, norm {self.grad_norm:g}, log-probs {self.log_probs:g} (absolute), "
            f"gradients {self.gradients:g}, updates {self.weights:g}"
        )
        return f"{numbers}; {self.why}"


# Measured on a CPU: the 30 layers of SmolLM2-135M with its own weights, 504 tokens.
# float32, pp2: loss 1.4e-7, norm 5.1e-5 (of 28 million squares in one sum), log-probs 2.5e-5, gradients 1.6e-5,
# updates 1.6e-6.
# bfloat16, dp1 and tp3: loss 1.5e-3, norm 7.4e-3, log-probs 0.39, gradients 0.19. A gradient that is half or twice what
# it should be is off by 0.5 or 1. An update is less than a unit in the last place of most weights: it shows little.
# Tiny models, two seeds, dp1, tp2, pp2, cp2, dp2: gradients 0.04 of llama and qwen3, 0.08 of them at 24 layers. Of
# qwen3_moe, deepseek_v3 and gpt_oss 0.27 to 0.69 and log-probs to 0.35, as most sequences have an undecided router,
# and log-probs change by that as by rounding: models with experts are compared in float32 (see run.py).
BOUNDS = {
    "float32": Bounds(
        loss=1e-5, grad_norm=1e-3, log_probs=5e-4, gradients=1e-4, weights=1e-3, router=1e-4,
        most=0.1, why="fp32 sums in another order gave a sixth of these at most in 30 layers",
    ),
    "bfloat16": Bounds(
        loss=1e-2, grad_norm=5e-2, log_probs=1.0, gradients=0.4, weights=0.5, router=0.05,
        most=0.45, why="bfloat16 keeps 3 digits of each number; small faults hide in that, which float32 finds",
    ),
}  # fmt: skip
