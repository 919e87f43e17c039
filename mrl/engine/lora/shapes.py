"""Defines LoRA adapters for every engine: names and shapes of A and B in peft's files, and the initial A.

Dimensions: `I` inputs and `O` outputs of a weight, `R` the rank of its adapter, `E` experts held as one parameter.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor

PREFIX = "base_model.model."
SCORE = PREFIX + "score.weight"
"""The head of a value model in an adapter folder. It trains whole (peft's `modules_to_save`)."""


@dataclasses.dataclass(frozen=True)
class AdapterShape:
    """Describes one adapter, of the weight `name.weight`, or of a stack of experts, the parameter `name`."""

    name: str
    peft_name: str  # the module under which peft keeps A and B (of two parameters of one module, one wraps the other)
    in_features: int
    out_features: int
    rank: int  # with experts, of each expert's adapter
    scale: float  # of B A
    experts: int = 0  # E, or 0 for a plain matrix
    transposed: bool = False  # the weight is held [I, O], not [O, I] (gpt2's), or the experts [E, I, O]
    parameter: str | None = None  # its full name if peft adapts a parameter, not a module

    @property
    def a_name(self) -> str:
        """Returns the name of A in the adapter's file."""
        return f"{PREFIX}{self.peft_name}.lora_A.weight"

    @property
    def b_name(self) -> str:
        """Returns the name of B in the adapter's file."""
        return f"{PREFIX}{self.peft_name}.lora_B.weight"

    @property
    def a_shape(self) -> tuple[int, int]:
        """Returns [R, I]; [E * R, I] for experts, with the rows of expert 0 first, then those of expert 1."""
        return (self.rank * max(self.experts, 1), self.in_features)

    @property
    def b_shape(self) -> tuple[int, int]:
        """Returns [O, R]; [O, R * E] for experts, with column `r` of expert `e` at `r * E + e`."""
        return (self.out_features, self.rank * max(self.experts, 1))

    def of_expert(self, a: Tensor, b: Tensor, expert: int) -> tuple[Tensor, Tensor]:
        """Returns A [R, I] and B [O, R] of one expert, views of the whole."""
        return a.view(self.experts, self.rank, -1)[expert], b.view(self.out_features, self.rank, self.experts)[
            ..., expert
        ]

    def delta(self, a: Tensor, b: Tensor) -> Tensor:
        """Returns the adapter's change of its weight, in the weight's shape: [O, I], [I, O] or a stack. In the dtype of
        A and B."""
        if not self.experts:
            delta = self.scale * (b @ a)
            return delta.mT if self.transposed else delta
        return torch.stack([self.delta_of_expert(a, b, expert) for expert in range(self.experts)])

    def delta_of_expert(self, a: Tensor, b: Tensor, expert: int) -> Tensor:
        """Returns `delta` of one expert: [O, I], or [I, O] if the weight is held so."""
        a_ri, b_or = self.of_expert(a, b, expert)
        delta = self.scale * (b_or @ a_ri)
        return delta.mT if self.transposed else delta


def initial_a(shape: AdapterShape, seed: int) -> Tensor:
    """Returns A at the start, fp32: uniform as peft draws it (kaiming, a = sqrt 5), by seed and name alone. B is 0."""
    digest = hashlib.sha256(f"{seed}:{shape.a_name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return (torch.rand(shape.a_shape, generator=generator) * 2 - 1) / math.sqrt(shape.in_features)


def adapter_shapes(shapes: Mapping[str, AdapterShape], head: str, hidden_size: int) -> dict[str, tuple[int, ...]]:
    """Returns every tensor of an adapter's file, with its shape: A and B of each adapter, and the score of a value
    head."""
    files: dict[str, tuple[int, ...]] = {shape.a_name: shape.a_shape for shape in shapes.values()}
    files |= {shape.b_name: shape.b_shape for shape in shapes.values()}
    return files | ({SCORE: (1, hidden_size)} if head == "value" else {})
