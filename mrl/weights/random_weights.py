"""Makes weights of a model that starts from scratch, the same in every layout and on every backend."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from mrl.weights.accounting import SCORE

CPU = torch.device("cpu")


class RandomWeights:
    """Replaces a weights file: every tensor is a function of (seed, name), so any layout starts from the same model.

    A value head is zero, as over a model that was loaded. Matrices are normal with the config's `initializer_range`,
    norms are one, biases zero. Gated delta nets start as in transformers (Qwen3_5PreTrainedModel._init_weights, 5.23).
    Other norms of such models have the factor 1 + weight.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        seed: int,
        std: float,
        device: torch.device = CPU,
        draws_score: bool = False,
    ) -> None:
        """Draws nothing yet. device: draws the numbers, which differ between CPUs and GPUs. draws_score: a value head
        is drawn too."""
        self.shapes, self.seed, self.std, self.device, self.draws_score = shapes, seed, std, device, draws_score
        self.centered = any(name.endswith(".A_log") for name in shapes)

    def __call__(self, name: str) -> Tensor:
        shape = self.shapes[name]
        starts_at_zero = name == SCORE and not self.draws_score
        if starts_at_zero or (name.endswith("bias") and not name.endswith(".dt_bias")):
            return torch.zeros(shape)
        if len(shape) == 1 and not name.endswith(".A_log"):
            centered = self.centered and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
            return torch.zeros(shape) if centered else torch.ones(shape)
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        generator = torch.Generator(self.device).manual_seed(int.from_bytes(digest[:7], "big"))
        drawn = {"generator": generator, "device": self.device}
        if name.endswith(".A_log"):
            return torch.rand(shape, **drawn).mul_(15.99).add_(0.01).log_()
        if name.endswith("linear_attn.conv1d.weight"):
            return (2 * torch.rand(shape, **drawn) - 1) * shape[-1] ** -0.5
        return torch.randn(shape, **drawn) * self.std
