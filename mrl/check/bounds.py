"""How far two right computations of one step may be apart, and why."""

from __future__ import annotations

import dataclasses

from torch import Tensor

UNSURE = 0.02
"""Mean of 1 - p over labels, below which bounds of gradients grow."""


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What the arithmetic may do to right numbers."""

    loss: float  # relative where the loss is above 1, else absolute: it is a mean of log-probs
    grad_norm: float  # relative
    log_probs: float  # the largest difference
    gradients: float  # relative L2 of a tensor
    weights: float  # relative L2 of what a step makes of a tensor
    router: float  # by which a router's scores of two experts may change, relative to their size
    why: str

    def given(self, log_probs: Tensor) -> Bounds:
        """Returns the bounds for a model that gives labels these log-probs [T], 0 where none trains.

        The gradient of a label's log-prob is 1 - p, of whose rounding fp32 knows 1e-7: where a model is nearly certain,
        that is a larger part of it.
        """
        unsure = float((1 - log_probs[log_probs != 0].double().exp()).mean()) if (log_probs != 0).any() else 1.0
        times = max(1.0, UNSURE / max(unsure, 1e-6))
        return dataclasses.replace(self, gradients=times * self.gradients, grad_norm=times * self.grad_norm)

    def __str__(self) -> str:
        numbers = (
            f"loss {self.loss:g}, norm {self.grad_norm:g}, log-probs {self.log_probs:g} (absolute), "
            f"gradients {self.gradients:g}, updates {self.weights:g}"
        )
        return f"{numbers}; {self.why}"


BOUNDS = {
    "float32": Bounds(
        loss=1e-5, grad_norm=1e-3, log_probs=5e-4, gradients=1e-4, weights=1e-3, router=1e-4,
        why="fp32 sums in another order give a tenth of these in 30 layers, and a fault gives 1e-2 and more",
    ),
    "bfloat16": Bounds(
        loss=1e-2, grad_norm=5e-2, log_probs=0.5, gradients=0.2, weights=0.5, router=0.05,
        why="bfloat16 keeps 3 digits of each number; small faults hide in that, which float32 finds",
    ),
}  # fmt: skip
