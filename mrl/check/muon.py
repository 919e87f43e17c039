"""Computes Muon in plain torch on whole matrices, as its author describes it
(https://kellerjordan.github.io/posts/muon).

Engines are compared with it, so none of their code is used here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from mrl.config.schema import OptimizerConfig


def matrices(name: str, tensor: Tensor, *, model_type: str) -> list[Tensor]:
    """Returns views of the matrices that Muon updates in a parameter of a transformers model, or in its gradient.

    Embeddings, heads, norms, biases and convolutions have none. transformers holds the experts of a layer in one
    parameter, and the two projections of each side by side.
    """
    if ".layers." not in name or name.endswith(("bias", "conv1d.weight")) or tensor.ndim < 2:
        return []
    if tensor.ndim == 2:
        return [tensor]
    joined = "gate_up" in name
    if model_type == "gpt_oss":  # columns are outputs, and those of the two projections alternate
        return [m.T for expert in tensor for m in ([expert[:, ::2], expert[:, 1::2]] if joined else [expert])]
    return [m for expert in tensor for m in (expert.chunk(2) if joined else [expert])]


class Muon:
    """Updates the matrices of some parameters by Muon, with fp64 products."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], config: OptimizerConfig, *, model_type: str) -> None:
        self.named, self.config, self.model_type = named, config, model_type
        self.averages: dict[tuple[str, int], Tensor] = {}

    def step(self, rate: float) -> None:
        """Makes an update from the gradients that are there."""
        own = self.config.muon
        for name, parameter in self.named:
            if parameter.grad is None:
                continue
            pairs = (matrices(name, t, model_type=self.model_type) for t in (parameter.data, parameter.grad))
            for number, (weight, gradient) in enumerate(zip(*pairs, strict=True)):
                average = (1 - own.momentum) * gradient
                if (name, number) in self.averages:
                    average += own.momentum * self.averages[name, number]
                self.averages[name, number] = average
                moved = own.momentum * average + (1 - own.momentum) * gradient if own.use_nesterov else average
                scale = own.extra_scale_factor * _scale(own.scale_mode, *weight.shape)
                update = scale * newton_schulz(moved.double(), own.num_ns_steps)
                weight -= rate * (self.config.weight_decay * weight + update.to(weight.dtype))


def newton_schulz(matrix: Tensor, steps: int) -> Tensor:
    """Returns the matrix with singular values near 1: each step makes of one, s, 3.4445 s - 4.775 s^3 + 2.0315 s^5."""
    x = matrix / max(float(matrix.norm()), 1e-7)
    for _ in range(steps):
        x3 = x @ x.T @ x
        x = 3.4445 * x - 4.7750 * x3 + 2.0315 * (x @ x.T @ x3)
    return x


def _scale(mode: str, rows: int, columns: int) -> float:
    return {
        "spectral": math.sqrt(max(rows, columns)),
        "unit_rms_norm": math.sqrt(rows / columns),
        "shape_scaling": math.sqrt(max(1, rows / columns)),
    }[mode]
