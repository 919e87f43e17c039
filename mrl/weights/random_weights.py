"""Makes weights of a model that starts from scratch, the same in every layout and on every backend."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


class RandomWeights:
    """Replaces a weights file: every tensor is a function of (seed, name), so any layout starts from the same model.

    Matrices are normal with the config's `initializer_range`, norms are one, biases zero.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], *, seed: int, std: float) -> None:
        self.shapes, self.seed, self.std = shapes, seed, std

    def __call__(self, name: str) -> Tensor:
        shape = self.shapes[name]
        if name.endswith("bias"):
            return torch.zeros(shape)
        if len(shape) == 1:
            return torch.ones(shape)
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        return torch.randn(shape, generator=generator) * self.std
